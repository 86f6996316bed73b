"""Rounds on the device: verify, accept, commit, project, and draft with a head of this process.

B rows of the bucket, N nodes a row, M = B * N, V vocabulary, H feature width, K own drafts.

A round is one graph: fused placement adds the drafting of the next round to it, colocated
placement keeps that in a second graph. What the next round of the same sessions needs (root,
lengths, own drafts) stays on the device, so it can be launched before the host has seen the
outcome of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Downloader, Readback
from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.inputs import HostVerdict, RoundInputs
from outrider.engine.device.own_head import OwnHead
from outrider.engine.device.recorder import Recorder
from outrider.engine.device.shapes import (
    NODE_BUCKETS,
    ROW_BUCKETS,
    Drafts,
    Judge,
    RoundShape,
    bucket,
)
from outrider.engine.device.slots import SessionSlots
from outrider.engine.device.target import RoundRows, TargetProgram
from outrider.engine.heads import FeatureProjection
from outrider.engine.kernels.acceptance import (
    DeviceAcceptance,
    accept_matching,
    advance_state,
)
from outrider.engine.kernels.assemble import assemble
from outrider.engine.kernels.coins import accept_sampled
from outrider.engine.kernels.compaction import compact_kv, gather_rows
from outrider.engine.kernels.layout import RoundLayout, tree_layout
from outrider.engine.kernels.sampling import choose_tokens
from outrider.engine.kernels.warp import TokenPath, count_tokens, warp_logits
from outrider.engine.target import TargetModel
from outrider.spec.tree import DraftTree


class Verified(NamedTuple):
    """Static results of a verify graph."""

    result: Tensor
    """int32 [B, 2 + 2N]: counts, resampled, rows, tokens (see `DeviceAcceptance`); with
    Judge.HOST int32 [M], the token rows."""
    acceptance: DeviceAcceptance | None
    context: Tensor
    """int32 [B]: K/V slots written before the round."""
    features: Tensor | None
    """[M, H]: of the accepted rows first, in every row of the bucket; with Judge.HOST of all
    rows in place."""
    logits: Tensor
    """float32 [M, V]."""


class RowInput(NamedTuple):
    """One session's row of a round."""

    slot: int
    tree: DraftTree | None = None
    """The host's draft."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launched:
    """A round on its way."""

    shape: RoundShape
    result: Readback | None
    """None with Judge.HOST, as `features`."""
    features: Readback | None
    """None too where none were asked for."""
    verified: Verified
    """Device tensors; valid until the shape is launched again."""


class DeviceRounds:
    """Launches rounds; every tensor that a graph reads or writes lives here."""

    def __init__(
        self,
        target: TargetModel,
        slots: SessionSlots,
        *,
        projection: FeatureProjection | None = None,
        own_head: OwnHead | None = None,
        fused: bool = False,
        graphs: bool = True,
        simulated_rates: Sequence[float] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`simulated_rates`: SIMULATED acceptance, the chance of each draft position."""
        self._device = target.device
        self._slots = slots
        self._pool = target.pool
        self._projection = projection
        self._own_head = own_head
        self._fused = fused
        self.graphs = GraphCache(target.device, enabled=graphs)
        self.recorder = recorder or Recorder(target.device, enabled=False)
        taps = projection.tap_layers if projection is not None else ()
        self._tapped = TargetProgram(target, taps)
        self._plain = TargetProgram(target)
        self._max_len = slots.sequence.tables.shape[1] * self._pool.block_tokens
        self._shapes: dict[tuple[int, int, Drafts, Judge, bool], RoundShape] = {}
        self._inputs: dict[tuple[int, int], RoundInputs] = {}
        self._verdicts: dict[RoundShape, HostVerdict] = {}
        self._downloads = Downloader(target.device)
        self._rates = None
        if simulated_rates is not None:
            self._rates = torch.tensor(simulated_rates, dtype=torch.float32, device=self._device)

    def launch(
        self, rows: Sequence[RowInput], *, drafts: Drafts, judge: Judge, features: bool
    ) -> Launched:
        """Start a round of rows of one kind; nothing waits for the device."""
        nodes = self._num_nodes(rows, drafts)
        # The head's own drafting reads the features of the round before it.
        tapped = features or drafts is Drafts.OWN
        shape = self._shape(bucket(len(rows), ROW_BUCKETS), nodes, drafts, judge, tapped)
        inputs = self._inputs_of(shape)
        inputs.fill([row.slot for row in rows], [row.tree for row in rows], drafts)
        verified = self._run(shape, inputs)
        if judge is Judge.HOST:
            return Launched(shape=shape, result=None, features=None, verified=verified)
        if not features or verified.features is None:
            result = self._downloads.start(verified.result)
            return Launched(shape=shape, result=result, features=None, verified=verified)
        result, sent = self._downloads.start_all((verified.result, verified.features))
        return Launched(shape=shape, result=result, features=sent, verified=verified)

    def draft_after(
        self,
        launched: Launched,
        counts: NDArray[np.int32],
        tokens: NDArray[np.int32],
        *,
        with_law: bool,
    ) -> None:
        """Draft again for rows with own drafts that the host judged.

        counts [n]: tokens emitted by each of the rows; tokens [n, N]: those, then anything. The
        sessions' prefixes have been set. with_law: whether a session among them may need the laws
        of these drafts.
        """
        shape, verified = launched.shape, launched.verified
        verdict = self._verdicts.get(shape)
        if verdict is None:
            verdict = self._verdicts[shape] = HostVerdict(shape.rows, shape.nodes, self._device)
        verdict.fill(counts, tokens)
        inputs = self._inputs[shape.rows, shape.nodes]
        with self.recorder.span("draft"):
            self.graphs.run(
                ("draft", shape, with_law),
                lambda: self._own_draft(
                    shape, inputs, verified, verdict.tokens, verdict.counts, with_law=with_law
                ),
            )

    def warm_up(self, shapes: Sequence[RoundShape]) -> None:
        """Compile and capture: rounds of nothing but padding rows."""
        for given in shapes:
            shape = self._shape(given.rows, given.nodes, given.drafts, given.judge, given.features)
            inputs = self._inputs_of(shape)
            inputs.fill([], [], shape.drafts)
            self._run(shape, inputs)

    def _num_nodes(self, rows: Sequence[RowInput], drafts: Drafts) -> int:
        if drafts is Drafts.OWN:
            assert self._own_head is not None
            return 1 + self._own_head.length
        largest = 0
        for row in rows:
            if row.tree is not None:
                largest = max(largest, len(row.tree.tokens))
        return bucket(1 + largest, NODE_BUCKETS)

    def _shape(
        self, rows: int, nodes: int, drafts: Drafts, judge: Judge, features: bool
    ) -> RoundShape:
        # One object a bucket: the keys of the graphs are then found without a comparison.
        key = (rows, nodes, drafts, judge, features)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = RoundShape(
                rows=rows, nodes=nodes, drafts=drafts, judge=judge, features=features
            )
        return shape

    def _inputs_of(self, shape: RoundShape) -> RoundInputs:
        key = (shape.rows, shape.nodes)
        inputs = self._inputs.get(key)
        if inputs is None:
            inputs = self._inputs[key] = RoundInputs(
                *key, padding=self._slots.padding, device=self._device
            )
        return inputs

    def _run(self, shape: RoundShape, inputs: RoundInputs) -> Verified:
        record, head = self.recorder, self._own_head
        if shape.drafts is not Drafts.OWN or head is None or shape.judge is Judge.HOST:
            with record.span("verify"):
                return self.graphs.run(shape, lambda: self._verify(shape, inputs))
        if self._fused:
            with record.span("round"):
                return self.graphs.run(
                    shape, lambda: self._draft(shape, inputs, self._verify(shape, inputs))
                )
        with record.span("verify"):
            verified = self.graphs.run(shape, lambda: self._verify(shape, inputs))
        with record.span("draft"):
            self.graphs.run(
                ("draft", shape), lambda: self._draft(shape, inputs, verified).acceptance
            )
        return verified

    @torch.inference_mode()
    def _verify(self, shape: RoundShape, inputs: RoundInputs) -> Verified:
        sequence, nodes = self._slots.sequence, shape.nodes
        slots = inputs.slots
        head = self._own_head if shape.drafts is Drafts.OWN else None
        drafts = inputs.drafts if head is None else head.tokens
        by_slot = head is not None
        tokens, context = assemble(sequence, slots, drafts, num_nodes=nodes, by_slot=by_slot)
        parents = inputs.parents if shape.drafts is Drafts.TREE else None
        rows = RoundRows(slots, context, sequence.tables)
        layout = tree_layout(
            parents,
            context,
            sequence.tables,
            slots,
            num_nodes=nodes,
            block_tokens=self._pool.block_tokens,
        )
        program = self._tapped if shape.features else self._plain
        output = program.forward(tokens, layout, rows, num_nodes=nodes, max_len=self._max_len)
        features = None
        if shape.features and self._projection is not None and output.taps is not None:
            features = self._projection(output.taps)
        if shape.judge is Judge.HOST:
            return Verified(tokens, None, context, features, output.logits)
        if shape.judge is Judge.SAMPLED:
            self._warp(shape, inputs, output.logits, tokens, layout)
        acceptance = self._accept(shape, inputs, output.logits, tokens, parents, layout.positions)
        if shape.drafts is Drafts.TREE:
            compact_kv(
                self._pool.storage,
                acceptance.rows,
                acceptance.counts,
                context,
                sequence.tables,
                slots,
                block_tokens=self._pool.block_tokens,
            )
            if features is not None:
                features = gather_rows(features, acceptance.rows, num_nodes=nodes)
        advance_state(acceptance, sequence, slots)
        if shape.judge is Judge.SAMPLED:
            self._count(acceptance, slots)
        result = torch.cat(
            (
                acceptance.counts[:, None],
                acceptance.resampled[:, None],
                acceptance.rows,
                acceptance.tokens,
            ),
            dim=1,
        )
        return Verified(result, acceptance, context, features, output.logits)

    def _warp(
        self,
        shape: RoundShape,
        inputs: RoundInputs,
        logits: Tensor,
        tokens: Tensor,
        layout: RoundLayout,
    ) -> None:
        path = None
        if shape.nodes > 1:
            mask = None if layout.mask is None else layout.mask[:, :, 1:]
            path = TokenPath(tokens.view(-1, shape.nodes)[:, 1:], mask)
        warp_logits(
            logits,
            self._slots.warp.state,
            self._slots.sampling,
            inputs.slots,
            layout.positions + 1,
            rows_per_slot=shape.nodes,
            path=path,
        )

    def _count(self, acceptance: DeviceAcceptance, slots: Tensor) -> None:
        """What was emitted is history from now on, for the head's warper too."""
        tokens, counts = acceptance.tokens, acceptance.counts
        count_tokens(tokens, counts, self._slots.warp.state, slots)
        if self._own_head is not None:
            warp = self._own_head.warp
            count_tokens(tokens, counts, warp.state, slots, columns=warp.draft_columns)

    def _accept(
        self,
        shape: RoundShape,
        inputs: RoundInputs,
        logits: Tensor,
        tokens: Tensor,
        parents: Tensor | None,
        positions: Tensor,
    ) -> DeviceAcceptance:
        state, slots, nodes = self._slots.sampling, inputs.slots, shape.nodes
        # The token chosen at a row takes the position after it.
        following = positions + 1
        chosen = choose_tokens(
            logits, state, slots, following, rows_per_slot=nodes, side="target", ids=None
        )
        if shape.judge is Judge.MATCH or self._rates is not None:
            rates = self._rates if nodes > 1 else None
            return accept_matching(
                chosen,
                tokens,
                parents,
                num_nodes=nodes,
                simulate=rates,
                state=state,
                slots=slots,
                positions=following,
            )
        head = self._own_head if shape.drafts is Drafts.OWN else None
        return accept_sampled(
            logits,
            chosen,
            tokens,
            parents,
            num_nodes=nodes,
            state=state,
            slots=slots,
            positions=following,
            law=None if head is None else head.law,
        )

    def _draft(self, shape: RoundShape, inputs: RoundInputs, verified: Verified) -> Verified:
        assert verified.acceptance is not None
        self._own_draft(
            shape,
            inputs,
            verified,
            verified.acceptance.tokens,
            verified.acceptance.counts,
            with_law=shape.judge is Judge.SAMPLED,
        )
        return verified

    @torch.inference_mode()
    def _own_draft(
        self,
        shape: RoundShape,
        inputs: RoundInputs,
        verified: Verified,
        tokens: Tensor,
        counts: Tensor,
        *,
        with_law: bool,
    ) -> None:
        assert self._own_head is not None and verified.features is not None
        self._own_head.draft(
            inputs.slots,
            tokens=tokens,
            features=verified.features.view(shape.rows, shape.nodes, -1),
            counts=counts,
            starts=verified.context,
            with_law=with_law,
        )
