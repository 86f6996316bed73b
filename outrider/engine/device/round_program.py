"""What one round computes on the device, as functions of static tensors: a graph records them.

B rows of the bucket, N nodes a row, Q pieces of prompts of P rows each, M = B * N + Q * P token
rows, V vocabulary, H feature width, K own drafts, X session slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.in_process_drafter import OwnHead
from outrider.engine.device.graphs.shapes import PIECE_TOKENS, Drafts, Judge, RoundShape
from outrider.engine.device.inputs.prefill_chunks import PieceInputs
from outrider.engine.device.inputs.round_inputs import RoundInputs
from outrider.engine.device.slots.session_slots import SessionSlots
from outrider.engine.device.target_program import RowGroup, TargetOutput, TargetProgram
from outrider.engine.heads import FeatureProjection
from outrider.engine.kernels.acceptance.matching import (
    DeviceAcceptance,
    accept_matching,
    advance_state,
)
from outrider.engine.kernels.acceptance.randomized import ChainLaw, DeviceLaw, accept_sampled
from outrider.engine.kernels.attention.compaction import compact_kv, gather_rows
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.engine.kernels.finite import find_finite_rows
from outrider.engine.kernels.logits_processor.draft_path import TokenPath
from outrider.engine.kernels.logits_processor.process import count_tokens, warp_logits
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.token_rows import assemble
from outrider.engine.target import TargetModel


class Verified(NamedTuple):
    """Static results of a verify graph."""

    result: Tensor
    """int32 [B * (2 + 2N) + Q]: of each row count, flags, rows, tokens (see
    `DeviceAcceptance`), then the token that each piece's end is followed by, -1 where the row has
    no finite logit."""
    acceptance: DeviceAcceptance | None
    """None without rows that decode, as `context`."""
    context: Tensor | None
    """int32 [B]: K/V slots written before the round."""
    first: Tensor | None
    """int32 [Q]: the tokens sampled behind the pieces, 0 where `result` has -1."""
    features: Tensor | None
    """[M, H]: of the accepted rows first, in every row of the bucket; then of the pieces."""


class _Placed(NamedTuple):
    """The rows that decode, before the forward."""

    tokens: Tensor
    """int32 [B * N]."""
    parents: Tensor | None
    law: DeviceLaw | ChainLaw | None
    """What the drafts were drawn from, where a rule asks for that."""
    group: RowGroup


class RoundProgram:
    """Verify, accept, commit, project, draft: launches kernels and looks at no value."""

    def __init__(
        self,
        target: TargetModel,
        slots: SessionSlots,
        *,
        projection: FeatureProjection | None,
        own_head: OwnHead | None,
        simulated_rates: Sequence[float] | None,
        max_token_rows: int,
    ) -> None:
        """`max_token_rows`: M at most."""
        self._slots = slots
        self._pool = target.pool
        self._projection = projection
        self._own_head = own_head
        self.projects = projection is not None
        """Whether rounds can make features."""
        taps = projection.tap_layers if projection is not None else ()
        # One for all shapes: a round's is looked at before the next one is launched.
        hidden = _hidden_states(target, max_token_rows)
        self._tapped = TargetProgram(target, taps, hidden=hidden)
        self._plain = TargetProgram(target, hidden=hidden)
        self._max_len = slots.sequence.tables.shape[1] * self._pool.block_tokens
        self._rates = None
        if simulated_rates is not None:
            self._rates = torch.tensor(simulated_rates, dtype=torch.float32, device=target.device)

    @torch.inference_mode()
    def verify(
        self, shape: RoundShape, inputs: RoundInputs | None, pieces: PieceInputs | None
    ) -> Verified:
        """A round up to what its sessions' next one needs, own drafts left out."""
        placed = None if inputs is None else self._placed(shape, inputs)
        output = self._forward(shape, placed, pieces)
        features = None
        if shape.features and self._projection is not None and output.taps is not None:
            features = self._projection(output.taps)
        decoding = shape.rows * shape.nodes
        # Before logits are warped in place: a grammar or a ban would hide it.
        finite = find_finite_rows(output.logits)
        found = first = None
        if pieces is not None:
            found = self._choose_first(shape, pieces, output.logits[decoding:], finite[decoding:])
            first = found.clamp(min=0)
            self._begin(shape, pieces, first)
        if placed is None:
            assert found is not None
            return Verified(found, None, None, first, features)
        logits = output.logits[:decoding]
        if shape.judge is Judge.SAMPLED:
            self._warp(shape, placed, logits)
        acceptance = self._accept(shape, placed, logits, finite[:decoding])
        features = self._commit(shape, placed, acceptance, features)
        words = [
            acceptance.counts[:, None],
            acceptance.flags[:, None],
            acceptance.rows,
            acceptance.tokens,
        ]
        result = torch.cat(words, dim=1).flatten()
        if found is not None:
            result = torch.cat((result, found))
        return Verified(result, acceptance, placed.group.context, first, features)

    def logits(self, rows: Tensor) -> Tensor:
        """The target's logits float32 [L, V], as they are, of token rows int64 [L] of the last
        round."""
        return self._plain.logits(rows)

    def _placed(self, shape: RoundShape, inputs: RoundInputs) -> _Placed:
        """The token rows of the sessions that decode."""
        sequence, slots, nodes = self._slots.sequence, inputs.slots, shape.nodes
        head = self._own_head if shape.drafts is Drafts.OWN else None
        parents = inputs.parents if shape.drafts is Drafts.TREE else None
        if head is not None and head.parents is not None:
            parents = head.parents.index_select(0, slots)
        drafts, own = (inputs.drafts, False) if head is None else (head.tokens, True)
        tokens, context = assemble(sequence, slots, drafts, num_nodes=nodes, by_slot=own)
        layout = tree_layout(
            parents,
            context,
            sequence.tables,
            slots,
            num_nodes=nodes,
            block_tokens=self._pool.block_tokens,
        )
        law: DeviceLaw | ChainLaw | None = None
        if own and self._own_head is not None:
            law = self._own_head.law
        elif shape.brings_laws:
            law = inputs.laws.law(shape.rows, nodes)
        return _Placed(tokens, parents, law, RowGroup(slots, context, layout, nodes))

    def _forward(
        self, shape: RoundShape, placed: _Placed | None, pieces: PieceInputs | None
    ) -> TargetOutput:
        tables = self._slots.sequence.tables
        groups, tokens = [], []
        if placed is not None:
            groups.append(placed.group)
            tokens.append(placed.tokens)
        logit_rows = None
        if pieces is not None:
            groups.append(pieces.group(tables, block_tokens=self._pool.block_tokens))
            tokens.append(pieces.tokens.flatten())
            decoding = shape.rows * shape.nodes
            rows = torch.arange(decoding, dtype=torch.int64, device=tables.device)
            logit_rows = torch.cat((rows, decoding + pieces.live_rows()))
        program = self._tapped if shape.features else self._plain
        return program.forward(
            tokens[0] if len(tokens) == 1 else torch.cat(tokens),
            groups,
            tables,
            max_len=self._max_len,
            logit_rows=logit_rows,
        )

    def _choose_first(
        self, shape: RoundShape, pieces: PieceInputs, logits: Tensor, finite: Tensor
    ) -> Tensor:
        """The tokens int32 [Q] behind the pieces, by logits [Q, V]; -1 where `finite` int32 [Q] is
        0."""
        state, positions = self._slots.sampling, pieces.next_positions()
        if shape.judge is Judge.SAMPLED:
            warp_logits(
                logits,
                self._slots.warp.state,
                state,
                pieces.slots,
                positions,
                rows_per_slot=1,
                legal=self._slots.legal.pieces,
            )
        return choose_tokens(
            logits, state, pieces.slots, positions, rows_per_slot=1, side="target", finite=finite
        )

    def _begin(self, shape: RoundShape, pieces: PieceInputs, first: Tensor) -> None:
        """Let prompts that end go on from their first tokens, int32 [Q]."""
        pieces.advance(self._slots.sequence, first)
        if shape.judge is Judge.SAMPLED:
            self._count(first[:, None], pieces.ends, pieces.slots)

    def _warp(self, shape: RoundShape, placed: _Placed, logits: Tensor) -> None:
        """What the sessions do to their logits [B * N, V], in place."""
        path, layout, nodes = None, placed.group.layout, shape.nodes
        if nodes > 1:
            mask = None if layout.mask is None else layout.mask[:, :, 1:]
            path = TokenPath(placed.tokens.view(-1, nodes)[:, 1:], mask)
        warp_logits(
            logits,
            self._slots.warp.state,
            self._slots.sampling,
            placed.group.slots,
            layout.positions + 1,
            rows_per_slot=nodes,
            path=path,
            legal=self._slots.legal.decoding,
        )

    def _count(self, tokens: Tensor, counts: Tensor, slots: Tensor) -> None:
        """The first `counts` int32 [B] of tokens int32 [B, n] are history from now on, for the
        head's warper too."""
        count_tokens(tokens, counts, self._slots.warp.state, slots)
        if self._own_head is not None:
            warp = self._own_head.warp
            count_tokens(tokens, counts, warp.state, slots, columns=warp.draft_columns)

    def _accept(
        self, shape: RoundShape, placed: _Placed, logits: Tensor, finite: Tensor
    ) -> DeviceAcceptance:
        state, slots, nodes = self._slots.sampling, placed.group.slots, shape.nodes
        # The token chosen at a row takes the position after it.
        following = placed.group.layout.positions + 1
        chosen = choose_tokens(
            logits, state, slots, following, rows_per_slot=nodes, side="target", finite=finite
        )
        if shape.judge is Judge.MATCH or self._rates is not None:
            return accept_matching(
                chosen,
                placed.tokens,
                placed.parents,
                num_nodes=nodes,
                simulate=self._rates if nodes > 1 else None,
                state=state,
                slots=slots,
                positions=following,
            )
        return accept_sampled(
            logits,
            chosen,
            placed.tokens,
            placed.parents,
            num_nodes=nodes,
            state=state,
            slots=slots,
            positions=following,
            law=placed.law,
        )

    def _commit(
        self,
        shape: RoundShape,
        placed: _Placed,
        acceptance: DeviceAcceptance,
        features: Tensor | None,
    ) -> Tensor | None:
        """Make what stands contiguous and move the sessions on; the features in that order."""
        sequence, group = self._slots.sequence, placed.group
        if placed.parents is not None:
            compact_kv(
                self._pool.storage,
                acceptance.rows,
                acceptance.counts,
                group.context,
                sequence.tables,
                group.slots,
                block_tokens=self._pool.block_tokens,
            )
            if features is not None:
                decoding = shape.rows * shape.nodes
                gathered = gather_rows(features[:decoding], acceptance.rows, num_nodes=shape.nodes)
                rest = features[decoding:]
                features = torch.cat((gathered, rest)) if shape.pieces else gathered
        advance_state(acceptance, sequence, group.slots)
        if shape.judge is Judge.SAMPLED:
            self._count(acceptance.tokens, acceptance.counts, group.slots)
        return features

    # ---- own drafts ----------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        pieces: PieceInputs | None,
        verified: Verified,
    ) -> None:
        """Own drafts for the next round of every session that decodes then."""
        assert self._own_head is not None
        rows = self._rows_to_draft(shape, inputs, pieces, verified)
        self._own_head.draft(rows, sampled=shape.judge is Judge.SAMPLED)

    @torch.inference_mode()
    def catch_up(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        pieces: PieceInputs | None,
        verified: Verified,
    ) -> None:
        """What own drafts of these sessions begin from, which are made later."""
        assert self._own_head is not None
        self._own_head.catch_up(self._rows_to_draft(shape, inputs, pieces, verified))

    def _rows_to_draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        pieces: PieceInputs | None,
        verified: Verified,
    ) -> NewRows:
        """The draft rows of what a round committed, and of the last rows of prompts that end; the
        head has written those before them."""
        head = self._own_head
        assert head is not None and verified.features is not None
        rows = None if inputs is None else self._new_rows(shape, inputs, verified)
        if pieces is not None:
            assert verified.first is not None
            features = verified.features[shape.rows * shape.nodes :]
            features = features.view(shape.pieces, PIECE_TOKENS, -1)
            head.program.forward.write(self._dead_rows(pieces, features))
            rows = self._with_live_rows(rows, pieces, features, verified.first)
        assert rows is not None
        return rows

    def _new_rows(self, shape: RoundShape, inputs: RoundInputs, verified: Verified) -> NewRows:
        """The draft rows of what a round committed."""
        acceptance, context = verified.acceptance, verified.context
        assert verified.features is not None and acceptance is not None and context is not None
        features = verified.features[: shape.rows * shape.nodes]
        return NewRows(
            slots=inputs.slots,
            tables=self._slots.sequence.tables,
            tokens=acceptance.tokens,
            features=features.view(shape.rows, shape.nodes, -1),
            counts=acceptance.counts,
            starts=context,
        )

    def _dead_rows(self, pieces: PieceInputs, features: Tensor) -> NewRows:
        """Rows of prompts whose prediction nobody wants: all but the last of each prompt."""
        return NewRows(
            slots=pieces.slots,
            tables=self._slots.sequence.tables,
            tokens=pieces.following,
            features=features,
            counts=pieces.counts - pieces.ends,
            starts=pieces.starts,
        )

    def _with_live_rows(
        self, rows: NewRows | None, pieces: PieceInputs, features: Tensor, first: Tensor
    ) -> NewRows:
        """`rows` and, behind them, the last row of every prompt that ends."""
        width = 1 if rows is None else rows.tokens.shape[1]
        live = features.flatten(0, 1)[pieces.live_rows()]
        tokens = first.new_full((pieces.num_pieces, width), -1)
        tokens[:, 0] = first
        own = live.new_zeros((pieces.num_pieces, width, live.shape[1]))
        own[:, 0] = live
        added = NewRows(
            slots=pieces.ended().int(),
            tables=self._slots.sequence.tables,
            tokens=tokens,
            features=own,
            counts=pieces.ends,
            # An absent piece has no token at all.
            starts=(pieces.next_positions() - 1).clamp(min=0),
        )
        if rows is None:
            return added
        return NewRows(
            slots=torch.cat((rows.slots, added.slots)),
            tables=rows.tables,
            tokens=torch.cat((rows.tokens, added.tokens)),
            features=torch.cat((rows.features, added.features)),
            counts=torch.cat((rows.counts, added.counts)),
            starts=torch.cat((rows.starts, added.starts)),
        )


def _hidden_states(target: TargetModel, rows: int) -> Tensor:
    """Room for the target's last hidden states [rows, H], writable in and out of inference mode."""
    like = target.weights.embedding
    with torch.inference_mode(False):
        return torch.zeros((rows, like.shape[1]), dtype=like.dtype, device=like.device)
