"""Computation of one round as functions of static tensors, recorded into a CUDA graph.

Shapes: B decoding rows of the bucket, N nodes per row, Q prefill chunks of P rows each, M = B * N +
Q * P token rows, L logit rows, V vocabulary size, H feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.drafting.in_process_drafter import InProcessDrafter
from outrider.engine.device.drafting.round_drafter import RoundDrafter
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS, AcceptanceMode, DraftKind, RoundShape
from outrider.engine.device.inputs.prefill_chunks import PrefillChunkInputs
from outrider.engine.device.inputs.round_inputs import RoundInputs
from outrider.engine.device.slots.session_slots import DeviceSessionSlots
from outrider.engine.device.target_kernels import RowGroup, TargetKernels
from outrider.engine.device.target_program import TargetOutput, TargetProgram
from outrider.engine.heads import FeatureProjection
from outrider.engine.kernels.acceptance.matching import (
    DeviceAcceptance,
    accept_matching,
    advance_state,
)
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
    accept_sampled,
)
from outrider.engine.kernels.attention.compaction import compact_kv, gather_rows
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.engine.kernels.finite import find_finite_rows
from outrider.engine.kernels.logits_processor.draft_path import OutputPath
from outrider.engine.kernels.logits_processor.process import count_tokens, process_logits
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.token_rows import build_verify_inputs
from outrider.engine.target import TargetModel


class VerifyOutput(NamedTuple):
    """Results of a verify graph, in static memory."""

    result: Tensor
    """int32 [B * (2 + 2N) + Q]: for each decoding row its count, flags, rows and tokens (see
    `DeviceAcceptance`); then the token after each prefill chunk, -1 if its row has no finite
    logit."""
    acceptance: DeviceAcceptance | None
    """Acceptance of the decoding rows; None if there are none."""
    context: Tensor | None
    """int32 [B]: number of KV slots of each session that were written before the round; None
    without decoding rows."""
    first: Tensor | None
    """int32 [Q]: the tokens sampled after the prefill chunks, 0 where `result` has -1; None without
    prefill chunks."""
    features: Tensor | None
    """[M, H]: features of the decoding rows, with the accepted nodes of each row first, followed by
    features of the prefill chunks. None if they are not computed."""


class _VerifyRows(NamedTuple):
    """Inputs of the decoding rows for the forward."""

    tokens: Tensor
    """int32 [B * N]: token ids."""
    parents: Tensor | None
    distribution: SparseDistribution | DenseChainDistribution | None
    """Distributions that the drafts were drawn from; None if not needed."""
    group: RowGroup


class RoundProgram:
    """Steps of a round: verify, accept, commit, project and draft. Never synchronises with the
    host."""

    def __init__(
        self,
        target: TargetModel,
        slots: DeviceSessionSlots,
        *,
        projection: FeatureProjection | None,
        in_process_drafter: RoundDrafter | None,
        simulated_acceptance: Sequence[float] | int | None,
        max_token_rows: int,
        kernels: TargetKernels,
    ) -> None:
        """`max_token_rows`: maximum number M of token rows. `kernels`: kernels of the target's
        forward. `simulated_acceptance`: see `RoundLauncher`."""
        self._slots = slots
        self._pool = target.pool
        self._kernels = kernels
        self._projection = projection
        self._in_process_drafter = in_process_drafter
        self.projects = projection is not None
        """Whether rounds can compute features."""
        taps = projection.tap_layers if projection is not None else ()
        # One buffer serves all shapes: a round's hidden states are read before the next launch.
        like = target.weights.embedding
        hidden = _row_buffer(max_token_rows, like.shape[1], like)
        self._features: Tensor | None = None
        """[max M, H]: the features of rounds with prefill chunks. One buffer is shared, because a
        buffer for each graph would take megabytes each."""
        if projection is not None:
            self._features = _row_buffer(max_token_rows, projection.hidden_size, like)
        self._tapped = TargetProgram(target, taps, hidden=hidden, kernels=kernels)
        self._plain = TargetProgram(target, hidden=hidden, kernels=kernels)
        self._max_len = slots.sequence.tables.shape[1] * self._pool.block_tokens
        self._simulate: Tensor | int | None = None
        if isinstance(simulated_acceptance, int):
            self._simulate = simulated_acceptance
        elif simulated_acceptance is not None:
            self._simulate = torch.tensor(
                simulated_acceptance, dtype=torch.float32, device=target.device
            )

    @torch.inference_mode()
    def run_verify(
        self, shape: RoundShape, inputs: RoundInputs | None, chunks: PrefillChunkInputs | None
    ) -> VerifyOutput:
        """Run a round up to the commit of its tokens, without in-process drafting, and update the
        state of the sessions for the next round."""
        placed = None if inputs is None else self._assigned_rows(shape, inputs)
        output = self._forward(shape, placed, chunks)
        features = None
        if shape.has_features and self._projection is not None and output.taps is not None:
            features = self._projection(output.taps)
        decoding = shape.rows * shape.nodes
        # This check precedes the logits processor, because bans and grammars would hide
        # non-finite logits.
        finite = find_finite_rows(output.logits)
        found = first = None
        if chunks is not None:
            found = self._choose_first(shape, chunks, output.logits[decoding:], finite[decoding:])
            first = found.clamp(min=0)
            self._begin(shape, chunks, first)
        if placed is None:
            assert found is not None
            return VerifyOutput(found, None, None, first, self._stored_features(shape, features))
        logits = output.logits[:decoding]
        if shape.is_sampled:
            self._process_logits(shape, placed, logits)
        acceptance = self._accept(shape, placed, logits, finite[:decoding])
        features = self._commit(shape, placed, acceptance, features)
        features = self._stored_features(shape, features)
        flags = acceptance.flags
        if shape.draft_kind is DraftKind.IN_PROCESS and self._in_process_drafter is not None:
            flags = self._in_process_drafter.flag_undrafted(flags)
        words = [
            acceptance.counts[:, None],
            flags[:, None],
            acceptance.rows,
            acceptance.tokens,
        ]
        result = torch.cat(words, dim=1).flatten()
        if found is not None:
            result = torch.cat((result, found))
        return VerifyOutput(result, acceptance, placed.group.context, first, features)

    def _stored_features(self, shape: RoundShape, features: Tensor | None) -> Tensor | None:
        """Return `features`, in rounds with prefill chunks as a copy in the shared buffer, which
        holds them until the next launch."""
        if features is None or self._features is None or not shape.chunks:
            return features
        stored: Tensor = self._features[: len(features)].copy_(features)
        return stored

    def target_logits(self, rows: Tensor) -> Tensor:
        """Return the target's logits before the logits processor, float32 [L, V], for some token
        rows of the last round. rows: int64 [L], indices of the token rows."""
        return self._plain.logits(rows)

    def _assigned_rows(self, shape: RoundShape, inputs: RoundInputs) -> _VerifyRows:
        """Return the inputs of the decoding rows."""
        sequence, slots, nodes = self._slots.sequence, inputs.slots, shape.nodes
        head = self._in_process_drafter if shape.draft_kind is DraftKind.IN_PROCESS else None
        distribution: SparseDistribution | DenseChainDistribution | None = None
        if head is not None:
            distribution = head.receive_drafts(
                slots,
                num_nodes=nodes,
                rejection=shape.acceptance_mode is AcceptanceMode.REJECTION,
            )
        elif shape.has_distributions:
            distribution = inputs.distributions.distribution_of(shape.rows, nodes)
        parents = inputs.parents if shape.draft_kind is DraftKind.TREE else None
        if head is not None and (drafted := head.parents_of(nodes)) is not None:
            parents = drafted[:, : nodes - 1].index_select(0, slots)
        drafts, own = (inputs.drafts, False) if head is None else (head.tokens, True)
        tokens, context = build_verify_inputs(sequence, slots, drafts, num_nodes=nodes, by_slot=own)
        layout = tree_layout(
            parents,
            context,
            sequence.tables,
            slots,
            num_nodes=nodes,
            block_tokens=self._pool.block_tokens,
            with_paths=self._kernels.reads_paths,
        )
        return _VerifyRows(tokens, parents, distribution, RowGroup(slots, context, layout, nodes))

    def _forward(
        self, shape: RoundShape, placed: _VerifyRows | None, chunks: PrefillChunkInputs | None
    ) -> TargetOutput:
        tables = self._slots.sequence.tables
        groups, tokens = [], []
        if placed is not None:
            groups.append(placed.group)
            tokens.append(placed.tokens)
        logit_rows = None
        if chunks is not None:
            groups.append(chunks.row_group(tables, block_tokens=self._pool.block_tokens))
            tokens.append(chunks.tokens.flatten())
            decoding = shape.rows * shape.nodes
            rows = torch.arange(decoding, dtype=torch.int64, device=tables.device)
            logit_rows = torch.cat((rows, decoding + chunks.live_rows()))
        program = self._tapped if shape.has_features else self._plain
        return program.run_forward(
            tokens[0] if len(tokens) == 1 else torch.cat(tokens),
            groups,
            tables,
            max_len=self._max_len,
            logit_rows=logit_rows,
        )

    def _choose_first(
        self, shape: RoundShape, chunks: PrefillChunkInputs, logits: Tensor, finite: Tensor
    ) -> Tensor:
        """Return the tokens int32 [Q] that follow the prefill chunks, chosen from logits [Q, V]; -1
        where `finite`, int32 [Q], is 0."""
        state, positions = self._slots.sampling, chunks.next_positions()
        if shape.is_sampled:
            process_logits(
                logits,
                self._slots.warp.state,
                state,
                chunks.slots,
                positions,
                rows_per_slot=1,
                allowed_tokens=self._slots.allowed.chunks,
            )
        return choose_tokens(
            logits, state, chunks.slots, positions, rows_per_slot=1, side="target", finite=finite
        )

    def _begin(self, shape: RoundShape, chunks: PrefillChunkInputs, first: Tensor) -> None:
        """Start decoding of prompts that end, from their first tokens int32 [Q]."""
        chunks.set_first_tokens(self._slots.sequence, first)
        if shape.is_sampled:
            self._count(first[:, None], chunks.ends, chunks.slots)

    def _process_logits(self, shape: RoundShape, placed: _VerifyRows, logits: Tensor) -> None:
        """Apply the sessions' logits processors to logits [B * N, V] in place."""
        path, layout, nodes = None, placed.group.round_layout, shape.nodes
        if nodes > 1:
            mask = None if layout.mask is None else layout.mask[:, :, 1:]
            path = OutputPath(placed.tokens.view(-1, nodes)[:, 1:], mask)
        process_logits(
            logits,
            self._slots.warp.state,
            self._slots.sampling,
            placed.group.slots,
            layout.positions + 1,
            rows_per_slot=nodes,
            path=path,
            allowed_tokens=self._slots.allowed.decoding,
        )

    def _count(self, tokens: Tensor, counts: Tensor, slots: Tensor) -> None:
        """Add the first `counts`, int32 [B], of tokens int32 [B, n] to the token history of the
        logits processors of target and drafter."""
        count_tokens(tokens, counts, self._slots.warp.state, slots)
        warp = None if self._in_process_drafter is None else self._in_process_drafter.logits_slots
        if warp is not None:
            count_tokens(tokens, counts, warp.state, slots, columns=warp.draft_columns)

    def _accept(
        self, shape: RoundShape, placed: _VerifyRows, logits: Tensor, finite: Tensor
    ) -> DeviceAcceptance:
        state, slots, nodes = self._slots.sampling, placed.group.slots, shape.nodes
        # The token chosen at a row takes the position after it.
        following = placed.group.round_layout.positions + 1
        chosen = choose_tokens(
            logits, state, slots, following, rows_per_slot=nodes, side="target", finite=finite
        )
        if shape.acceptance_mode is AcceptanceMode.MATCH or self._simulate is not None:
            return accept_matching(
                chosen,
                placed.tokens,
                placed.parents,
                num_nodes=nodes,
                simulate=self._simulate if nodes > 1 else None,
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
            distribution=placed.distribution,
        )

    def _commit(
        self,
        shape: RoundShape,
        placed: _VerifyRows,
        acceptance: DeviceAcceptance,
        features: Tensor | None,
    ) -> Tensor | None:
        """Make accepted KV rows contiguous and advance the sessions; return the features in the
        same order."""
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
                features = torch.cat((gathered, rest)) if shape.chunks else gathered
        advance_state(acceptance, sequence, group.slots)
        if shape.is_sampled:
            self._count(acceptance.tokens, acceptance.counts, group.slots)
        return features

    # ---- in-process drafts ---------------------------------------------------------------------

    @torch.inference_mode()
    def run_drafts(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        chunks: PrefillChunkInputs | None,
        verified: VerifyOutput,
    ) -> None:
        """Make the in-process drafts for the next round, for all decoding sessions and for sessions
        whose prompt ended in this round."""
        assert self._in_process_drafter is not None
        rows = self._rows_to_draft(shape, inputs, chunks, verified)
        self._in_process_drafter.draft_round(rows, num_nodes=shape.nodes, sampled=shape.is_sampled)

    @torch.inference_mode()
    def store_catch_up(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        chunks: PrefillChunkInputs | None,
        verified: VerifyOutput,
    ) -> None:
        """Store the draft rows of this round, for in-process drafts that are made later. A draft
        row is a newly committed token of a session with its feature; the draft head needs both."""
        assert isinstance(self._in_process_drafter, InProcessDrafter)
        self._in_process_drafter.store_catch_up(
            self._rows_to_draft(shape, inputs, chunks, verified)
        )

    def _rows_to_draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs | None,
        chunks: PrefillChunkInputs | None,
        verified: VerifyOutput,
    ) -> NewRows:
        """Return the draft rows of committed tokens, and the last draft row of each prompt that
        ends in this round. All other draft rows of prompts are passed to the drafter here."""
        head = self._in_process_drafter
        assert head is not None and verified.features is not None
        head.begin_rows()
        rows = None if inputs is None else self._new_rows(shape, inputs, verified)
        if chunks is not None:
            assert verified.first is not None
            features = verified.features[shape.rows * shape.nodes :]
            features = features.view(shape.chunks, CHUNK_TOKENS, -1)
            head.write_rows(self._dead_rows(chunks, features))
            rows = self._with_live_rows(rows, chunks, features, verified.first)
        assert rows is not None
        return rows

    def _new_rows(self, shape: RoundShape, inputs: RoundInputs, verified: VerifyOutput) -> NewRows:
        """Return the draft rows of the tokens that a round committed."""
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

    def _dead_rows(self, chunks: PrefillChunkInputs, features: Tensor) -> NewRows:
        """Return the rows of prompts whose prediction is not needed: all but the last row of each
        prompt."""
        return NewRows(
            slots=chunks.slots,
            tables=self._slots.sequence.tables,
            tokens=chunks.following,
            features=features,
            counts=chunks.counts - chunks.ends,
            starts=chunks.starts,
        )

    def _with_live_rows(
        self, rows: NewRows | None, chunks: PrefillChunkInputs, features: Tensor, first: Tensor
    ) -> NewRows:
        """Return `rows`, followed by the last row of every prompt that ends."""
        width = 1 if rows is None else rows.tokens.shape[1]
        live = features.flatten(0, 1)[chunks.live_rows()]
        tokens = first.new_full((chunks.num_chunks, width), -1)
        tokens[:, 0] = first
        own = live.new_zeros((chunks.num_chunks, width, live.shape[1]))
        own[:, 0] = live
        added = NewRows(
            slots=chunks.ended_slots().int(),
            tables=self._slots.sequence.tables,
            tokens=tokens,
            features=own,
            counts=chunks.ends,
            # A chunk that ends no prompt has count 0; start 0 keeps its drafts from reading
            # context.
            starts=torch.where(chunks.ends > 0, chunks.next_positions() - 1, 0),
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


def _row_buffer(rows: int, width: int, like: Tensor) -> Tensor:
    """Return static memory [rows, width] of the dtype and device of `like`, writable inside and
    outside of inference mode."""
    with torch.inference_mode(False):
        return torch.zeros((rows, width), dtype=like.dtype, device=like.device)
