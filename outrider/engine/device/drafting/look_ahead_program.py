"""Look-ahead drafting on static device tensors: drafts for outcomes of an unverified proposal.

An outcome is a possible end of a round: an accepted path of the proposal and the next token. The
draft model runs over the tokens of a proposal while the target verifies it. Its output at a
position predicts the token after it; the output of an EAGLE head is also the feature for drafts
that continue there.

A branch is the draft for one outcome. It is made like the draft of a session
(`DraftProgram.draft_chain` or `draft_tree`), with a block table of its own that begins with the
blocks of the session. At most one partly filled block of the prefix is copied.

Shapes: B sessions or branches, R new draft rows of a branch, N nodes of a proposal, P = 1 + N
positions (the root, then the nodes), c candidates a position, F width of a feature, X session
slots, T blocks of a table, V branches that blocks are reserved for, S blocks reserved for each of
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.alternatives import ranked_alternatives
from outrider.engine.device.drafting.draft_forward import NewRows, ProposalNodes
from outrider.engine.device.drafting.draft_program import DraftProgram
from outrider.engine.device.drafting.draft_row_state import DraftSampling
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import process_draft_logits
from outrider.engine.kernels.session_tensors import LogitsProcessorState, SamplingState


class CandidateScores(NamedTuple):
    """Candidates for the token after each position of a proposal. Positions without a node hold
    arbitrary values."""

    tokens: Tensor
    """int32 [B, P, c]: target ids, best first, padded with -1."""
    logprobs: Tensor
    """float32 [B, P, c]: log-probabilities of `tokens`; -inf for padding."""
    features: Tensor
    """[B, P, F]: the feature of the first draft row after each position."""


class OutcomeRows(NamedTuple):
    """New draft rows of branches, one branch for each outcome. Rows after the first `counts` rows
    of a branch are padding, but their features must be finite."""

    owners: Tensor
    """int32 [B]: the session slot of each branch."""
    counts: Tensor
    """int32 [B]: number of new rows of each branch. The last of them contains the outcome's next
    token. 0 for padding."""
    starts: Tensor
    """int32 [B]: draft position of each branch's first new row."""
    tokens: Tensor
    """int32 [B, R]: target id of each row's token, padded with -1."""
    sources: Tensor
    """int32 [B, R]: index of each row's feature among the stored features."""
    draft_keys: Tensor
    """int64 [B]: key of each branch's DRAFT noise stream."""


class LookAheadProgram(DraftProgram):
    """A `DraftProgram` that can also draft for outcomes of unverified proposals."""

    def score_proposals(
        self,
        rows: NewRows,
        given: ProposalNodes,
        *,
        state: SamplingState,
        count: int,
        sweeps: int,
        warp: LogitsProcessorState | None = None,
    ) -> CandidateScores:
        """Write the KV of new rows, run the draft model over the given proposals, and return the
        `count` most probable tokens after every position.

        Tokens are ranked by softmax(logits / T). For coupled sessions, the noise shared with the
        target is added before ranking. state, warp: as in `DraftProgram.draft_chain`. sweeps: see
        `DraftForward.run_proposal`. A session's block table must cover the rows up to live + N.
        """
        forward, vocabulary, num_nodes = (
            self.forward,
            self.forward.vocabulary,
            given.tokens.shape[1],
        )
        layout = forward.layout(rows, num_steps=1, step_rows=num_nodes)
        below = forward.proposal_layout(given, layout.live)
        x = forward.run_proposal(rows, given, layout, below, sweeps)
        # All tokens are known, so one pass over the output projection serves all positions.
        logits, following = forward.logits(x.flatten(0, 1)), below.following
        if warp is not None:
            columns = vocabulary.columns_of(given.tokens)
            path = OutputPath(columns, None if given.are_chains else below.seen)
            logits = process_draft_logits(logits, warp, state, rows.slots, following, path)
        heat = state.temperatures[rows.slots.long()].repeat_interleave(1 + num_nodes)
        found, logprobs = ranked_alternatives(
            logits,
            count,
            state,
            rows.slots,
            following,
            ids=vocabulary.target_ids,
            temperatures=heat,
        )
        shape = (*x.shape[:2], count)
        features = x[..., : forward.feature_size]
        return CandidateScores(found.view(shape), logprobs.view(shape), features)

    def fork_outcomes(
        self,
        rows: OutcomeRows,
        *,
        tables: Tensor,
        scratch: Tensor,
        held: Tensor,
        counted: bool,
        below_chains: bool,
    ) -> tuple[NewRows, DraftSampling]:
        """Return the draft rows of branches, in a form in which each branch is a session of its
        own, and the sampling state of these rows.

        rows: the branches' new rows. tables: int32 [X, T], block tables of the sessions. scratch:
        int32 [V, S + 1], the S blocks reserved for each branch, followed by a padding block. A
        branch's blocks must be enough for all rows that it writes, counted from the beginning of
        the block of its first new row. held: [any number, F], stored features, which `rows.sources`
        indexes. counted: whether penalties must count the tokens of `rows`. below_chains: whether
        the outcomes are those of chains that `score_proposals` has run. If the model keeps their KV
        (`DraftForward.keeps_proposal_kv`), only the last row of each branch is returned.
        """
        uncounted = self.forward.vocabulary.columns_of(rows.tokens) if counted else None
        if below_chains and self.forward.keeps_proposal_kv:
            rows = _outcomes_alone(rows)
        size, owners = self.forward.block_tokens, rows.owners.long()
        first = (rows.starts // size)[:, None]
        theirs, own = tables[owners], scratch[: len(owners)]
        beyond = torch.arange(tables.shape[1], device=owners.device) - first
        forked = own.gather(1, beyond.clamp(0, own.shape[1] - 1).long())
        self.forward.copy_blocks(theirs.gather(1, first.long())[:, 0], own[:, 0])
        new = NewRows(
            slots=torch.arange(len(owners), dtype=torch.int32, device=owners.device),
            tables=torch.where(beyond < 0, theirs, forked),
            tokens=rows.tokens,
            features=held[rows.sources.long()],
            counts=rows.counts,
            starts=rows.starts,
        )
        return new, DraftSampling(rows.owners, rows.draft_keys, uncounted)


def _outcomes_alone(rows: OutcomeRows) -> OutcomeRows:
    """Return only the last row of each path, because the KV of the rows before it is in the
    session's own table."""
    last = (rows.counts - 1).clamp(min=0)
    return rows._replace(
        counts=rows.counts.clamp(max=1),
        starts=rows.starts + last,
        tokens=rows.tokens.gather(1, last[:, None].long()),
        sources=rows.sources.gather(1, last[:, None].long()),
    )
