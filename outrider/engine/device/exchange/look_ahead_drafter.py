"""Makes drafts for outcomes of a round while the verifier runs it, on the drafter's device alone.

An outcome of a chain that is being verified consists of the number of its accepted tokens and the
next token. While the verifier runs, the drafter drafts for the most probable outcomes, each as a
branch of its own (`LookAheadProgram.fork_outcomes`). Outcomes are ranked by the summed
log-probabilities of their tokens. If a round ends with one of these outcomes, the next round
verifies the draft made for it. The rows that the verifier sends then contain the index of the
outcome and the digest of its prefix, and the drafter continues after that draft.

Shapes: R rows of a round, K tokens of a chain, P = K + 1 places in a chain after which acceptance
may end, F outcomes of a session, C candidates per place, Y session slots, T blocks of a table, Vd
draft vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.alternatives import ranked_alternatives
from outrider.engine.device.drafting.draft_forward import AttentionContext, NewRows
from outrider.engine.device.drafting.draft_program import ChainDraft
from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram, OutcomeRows
from outrider.engine.kernels.exchange.drafts import advance_digests
from outrider.engine.kernels.exchange.verdicts import TakenRows
from outrider.engine.kernels.logits_processor.process import process_draft_logits
from outrider.engine.kernels.session_tensors import (
    RULE_NUMBERS,
    LogitsProcessorState,
    SamplingState,
)
from outrider.spec.sampling import Rule

_CANDIDATES: Final = 8
"""Number of candidate tokens per position. Further tokens are hardly ever among the most probable
outcomes."""


class _Outcomes(NamedTuple):
    """Outcomes of each session for which drafts are made."""

    places: Tensor
    """int64 [R, F]: number of accepted tokens of the chain."""
    tokens: Tensor
    """int32 [R, F]: the token after the accepted tokens."""
    are_there: Tensor
    """bool [R, F]: whether the outcome exists."""


class LookAheadDrafter:
    """Makes drafts for outcomes of the chains that were drafted last. Never synchronises with the
    host."""

    def __init__(
        self,
        program: LookAheadProgram,
        *,
        tables: Tensor,
        sampling: SamplingState,
        outcomes: int,
        length: int,
        max_rows: int,
        first_block: int,
    ) -> None:
        """`tables`: int32 [Y, T], block tables. `outcomes`: F. `length`: K. `max_rows`: maximum
        number of rows of a round. `first_block`: index of the first KV block that is reserved for
        branches. `blocks_needed` returns the number of these blocks. The block before them receives
        the KV of padding."""
        self._program, self._tables, self._sampling = program, tables, sampling
        self._outcomes, self._length = outcomes, length
        device, slots = tables.device, len(tables)
        branches = max_rows * outcomes
        blocks = _branch_blocks(length, program.forward.block_tokens)
        with torch.inference_mode(False):
            own = torch.arange(branches * blocks, dtype=torch.int32, device=device) + first_block
            padding = torch.full((branches, 1), first_block - 1, dtype=torch.int32, device=device)
            self._scratch = torch.cat((own.view(branches, blocks), padding), dim=1)
            self._digests = torch.zeros((slots, outcomes), dtype=torch.int64, device=device)
            self._tokens = torch.full(
                (slots, outcomes, length), -1, dtype=torch.int32, device=device
            )

    @staticmethod
    def blocks_needed(*, outcomes: int, length: int, max_rows: int, block_tokens: int) -> int:
        """Return the number of KV blocks that the branches of a round need: `outcomes` branches for
        each of `max_rows` rows, with drafts of `length` tokens."""
        return max_rows * outcomes * _branch_blocks(length, block_tokens)

    def chosen_columns(self, taken: TakenRows) -> Tensor:
        """Return the look-ahead drafts that the verifier verifies in its next round, as draft ids
        int32 [R, K]. Rows that need a new draft have -1."""
        slots, outcome = taken.slots.long(), taken.outcomes
        place = outcome.clamp(0, self._outcomes - 1).long()[:, None]
        digests = self._digests[slots].gather(1, place)[:, 0]
        is_chosen = (outcome >= 0) & (outcome < self._outcomes) & (digests == taken.digests)
        tokens = self._tokens[slots, place[:, 0]]
        columns = self._program.forward.vocabulary.columns_of(tokens)
        return torch.where(is_chosen[:, None], columns, -1)

    def draft_outcomes(
        self,
        taken: TakenRows,
        rows: NewRows,
        drafted: ChainDraft,
        warp: LogitsProcessorState | None,
    ) -> tuple[Tensor, Tensor]:
        """Draft for outcomes of the chains in `drafted`. Return the digest of each outcome's
        prefix, int64 [R, F], and the tokens drafted for it, int32 [R, F, K], which are -1 for
        outcomes without a draft.

        taken: the rows of the round. rows: the same rows as input of the draft model. drafted: the
        chains drafted from them, with `levels`. warp: as in `DraftProgram.draft_chain`.
        """
        places, live, features = self.rank_outcomes(rows, drafted, warp)
        batch, length, outcomes = len(rows.slots), self._length, self._outcomes
        branches = batch * outcomes
        digests = self._digests_of(taken, drafted.tokens, places)
        depth = places.places.flatten()
        owner = torch.arange(batch, device=depth.device).repeat_interleave(outcomes)
        has_rows = (taken.counts > 0)[owner]
        most = self._tables.shape[1] * self._program.forward.block_tokens - 1
        forked, drawing = self._program.fork_outcomes(
            OutcomeRows(
                owners=rows.slots.repeat_interleave(outcomes),
                counts=(places.are_there.flatten() & has_rows).int(),
                starts=(live[owner] + 1 + depth).clamp(0, most).int(),
                tokens=places.tokens.reshape(branches, 1),
                sources=(owner * (length + 1) + depth)[:, None].int(),
                draft_keys=taken.digests[owner],
            ),
            tables=rows.tables,
            scratch=self._scratch,
            held=features.flatten(0, 1),
            counted=False,
            below_chains=False,
        )
        branch = self._program.draft_chain(
            forked, state=self._sampling, length=length, warp=warp, drawing=drawing
        )
        # Draws of the rejection rule come with distributions, which outcomes have not.
        rules = self._sampling.rules[rows.slots.long()]
        is_drafted = places.are_there & (rules != RULE_NUMBERS[Rule.REJECTION])[:, None]
        tokens = branch.tokens.view(batch, outcomes, length)
        tokens = torch.where(is_drafted[..., None], tokens, -1)
        slots = taken.slots.long()
        self._digests.index_copy_(0, slots, digests)
        self._tokens.index_copy_(0, slots, tokens)
        return digests, tokens

    def rank_outcomes(
        self, rows: NewRows, drafted: ChainDraft, warp: LogitsProcessorState | None
    ) -> tuple[_Outcomes, Tensor, Tensor]:
        """Return the most probable outcomes of the chains in `drafted`, the draft position of each
        live row, int32 [R], and the features after all places, [R, P, H] (H: feature width)."""
        forward, state = self._program.forward, self._sampling
        levels, (batch, length) = drafted.levels, drafted.tokens.shape
        assert levels is not None
        layout = forward.layout(rows, num_steps=length)
        positions = forward.row_positions(layout.positions, layout.write_slots)
        first = batch * (rows.tokens.shape[1] + length - 1)
        here = slice(first, first + batch)
        session = AttentionContext(rows.tables, rows.slots, layout.positions[here])
        last = forward.run_step(
            drafted.columns[:, -1],
            levels.features[-1],
            positions.select(here),
            session,
            num_nodes=1,
        )
        logits = forward.logits(last)
        if warp is not None:
            logits = process_draft_logits(
                logits, warp, state, rows.slots, layout.following[length], None
            )
        features = torch.stack((*levels.features, last), dim=1)
        found, logprobs = ranked_alternatives(
            torch.stack((*levels.logits, logits), dim=1).flatten(0, 1),
            _CANDIDATES,
            state,
            rows.slots,
            layout.following.view(length + 1, batch).t().reshape(-1),
            ids=forward.vocabulary.target_ids,
            temperatures=state.temperatures[rows.slots.long()].repeat_interleave(length + 1),
        )
        shape = (batch, length + 1, _CANDIDATES)
        outcomes = rank_outcomes(
            drafted.tokens, found.view(shape), logprobs.view(shape), count=self._outcomes
        )
        return outcomes, layout.live, features

    def _digests_of(self, taken: TakenRows, drafted: Tensor, found: _Outcomes) -> Tensor:
        """Return the digest of the prefix of each outcome, int64 [R, F]."""
        (batch, outcomes), length = found.tokens.shape, drafted.shape[1]
        at = torch.arange(length + 1, device=drafted.device)
        chain = torch.cat((drafted, drafted[:, :1]), dim=1)[:, None]
        path = torch.where(at == found.places[..., None], found.tokens[..., None], chain)
        digests = taken.digests.repeat_interleave(outcomes)
        advance_digests(
            digests,
            torch.arange(batch * outcomes, dtype=torch.int32, device=drafted.device),
            path.reshape(batch * outcomes, length + 1),
            found.places.flatten().int() + 1,
        )
        return digests.view(batch, outcomes)


def rank_outcomes(drafted: Tensor, tokens: Tensor, logprobs: Tensor, *, count: int) -> _Outcomes:
    """Return the `count` most probable outcomes of each chain.

    An outcome consists of a number of accepted tokens of the chain and the next token. The next
    token differs from the chain's token at that position; after the whole chain it may be any
    token.

    drafted: int32 [R, K], the chains. tokens: int32 [R, P, C], candidates for the next token after
    each place, best first, padded with -1. logprobs: float32 [R, P, C], their log-probabilities,
    padded with -inf.
    """
    batch, length = drafted.shape
    is_next = tokens[:, :length] == drafted[..., None]
    # A drafted token that is no candidate is less likely than all of them.
    unlikely = logprobs[:, :length].nan_to_num(neginf=-1e4).amin(dim=2) - 1.0
    steps = torch.where(is_next, logprobs[:, :length], -torch.inf).amax(dim=2)
    steps = torch.maximum(steps, unlikely)
    reached = torch.cat((steps.new_zeros(batch, 1), steps.cumsum(1)), dim=1)
    scores = reached[..., None] + logprobs
    scores[:, :length].masked_fill_(is_next, -torch.inf)
    scores.masked_fill_(tokens < 0, -torch.inf)
    best, chosen = scores.flatten(1).topk(count, dim=1)
    return _Outcomes(
        places=chosen // tokens.shape[2],
        tokens=tokens.flatten(1).gather(1, chosen),
        are_there=best > -torch.inf,
    )


def _branch_blocks(length: int, block_tokens: int) -> int:
    """Return the number of blocks that `length` rows need, whatever their position in the first
    block."""
    return (length + 2 * (block_tokens - 1)) // block_tokens
