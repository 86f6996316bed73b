"""Drafts from an EAGLE-3 head whose whole draft is one launch on the device.

A batch of sessions costs one upload, one graph (catch-up, all levels, all choices) and one
download; the host waits for the device once. What the device does not cover (the rejection rule,
whose law is quantised on the host, penalties, bans, truncated laws, coupled trees) goes to a
`HeadSource` over the same weights.

B rows of a bucket, R new rows a session, H hidden size, K chain length, n tree nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Downloader
from outrider.engine.device.draft import DraftProgram, NewRows
from outrider.engine.device.graphs import GraphCache
from outrider.engine.device.head_weights import HeadWeights
from outrider.engine.device.health import device_works
from outrider.engine.device.shapes import ROW_BUCKETS, bucket
from outrider.engine.heads import DraftHead
from outrider.engine.kernels.layout import PADDING_NODE
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import MAX_DRAFT_TOKENS, DraftMethod, Plan
from outrider.spec.tree import DraftTree
from outrider.wire.messages import FeatureLayout, TensorDtype, WireTensor
from outrider_drafter.device_batch import (
    MAX_BATCH,
    NEW_ROW_BUCKETS,
    DraftBatch,
    Ready,
    SessionRows,
    raw_array,
)
from outrider_drafter.device_rows import BLOCK_TOKENS, DeviceRows
from outrider_drafter.device_shapes import Shape, covers, shape_of
from outrider_drafter.growth import Draft, default_depth
from outrider_drafter.head_source import HeadSource
from outrider_drafter.sessions import Session, SessionKey
from outrider_drafter.source import Drafted

logger = logging.getLogger(__name__)

_MAX_ROWS_PER_WRITE: Final = 1024
_WIRE_DTYPES: Final = {
    torch.float32: TensorDtype.FLOAT32,
    torch.float16: TensorDtype.FLOAT16,
    torch.bfloat16: TensorDtype.BFLOAT16,
}
_TREE_ROWS: Final = 2048
"""Draft rows beyond its context that a session's table has room for."""


class DeviceHeadSource:
    """The EAGLE-3 head as a draft source for an accelerator; on a CPU it runs the same code."""

    feature_layout = FeatureLayout.PROJECTED
    method = DraftMethod.EAGLE3

    def __init__(
        self,
        head: DraftHead,
        *,
        max_rows: int,
        max_context: int = 0,
        max_sessions: int = 1024,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        cuda_graphs: bool = True,
    ) -> None:
        """`max_rows` bounds the K/V rows of all sessions (of those on the host apart);
        `max_context` (0: the head's own) the draft positions of one. Raises
        FailedPreconditionError for heads without plain EAGLE-3 weights."""
        config = head.config
        self.feature_size = config.hidden_size
        self.feature_fingerprint = head.fingerprint
        self.head = head
        self._dtype, self._device = dtype, torch.device(device)
        self._max_rows = max_rows
        self._max_context = max_context or config.max_position_embeddings
        self._rows = DeviceRows(
            config,
            max_rows=max_rows,
            max_session_rows=self._max_context + _TREE_ROWS,
            max_sessions=max_sessions,
            dtype=dtype,
            device=self._device,
        )
        self._program = DraftProgram(
            HeadWeights.from_head(head),
            storage=self._rows.storage,
            block_tokens=BLOCK_TOKENS,
            max_len=self._rows.capacity,
        )
        self.graphs = GraphCache(self._device, enabled=cuda_graphs)
        self._batch = DraftBatch(self._rows, config.hidden_size, dtype, self._device)
        self._downloads = Downloader(self._device)
        self._states: dict[SessionKey, SessionRows] = {}
        self._on_host: set[SessionKey] = set()
        self._host: HeadSource | None = None

    @property
    def used_rows(self) -> int:
        """K/V rows reserved now."""
        return self._rows.used_rows + (self._host.used_rows if self._host else 0)

    @property
    def usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return device_works(self._device)

    def kv(self, handle: int, connection: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, S, d] of a session's stable rows, for inspection."""
        key = SessionKey(connection, handle)
        if key in self._on_host:
            return self._host_source().kv(handle, connection)
        state = self._states[key]
        return self._rows.view(state.slot, state.stable)

    @torch.inference_mode()
    def warm_up(self, plans: Sequence[Plan], *, max_batch: int) -> None:
        """Compile the kernels and capture the graphs of these plans' chains and trees for batches
        of up to `max_batch` sessions, so that no session waits for it."""
        for plan in plans:
            depth = plan.draft_tokens if plan.top_k == 1 else plan.depth
            depth = min(depth or default_depth(plan.draft_tokens), plan.draft_tokens)
            shape = Shape(plan.draft_tokens, plan.top_k, depth)
            most = bucket(plan.draft_tokens + 1, NEW_ROW_BUCKETS)
            for size in (s for s in ROW_BUCKETS if s <= bucket(max_batch, ROW_BUCKETS)):
                for num_rows in (r for r in NEW_ROW_BUCKETS if r <= most):
                    result = self._launch(shape, [], size, num_rows)
                    self._downloads.start(result).wait()

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[Session]) -> None:
        """Write the K/V of all rows that the sessions' features allow."""
        for session in sessions:
            if self._is_on_host(session):
                self._host_source().catch_up([session])
                continue
            state = self._absorb(session)
            if not state.shut:
                self._write_ahead(session, state, keep=0)

    @torch.inference_mode()
    def drafts(self, sessions: Sequence[Session]) -> Iterator[Drafted]:
        """Catch up and draft: one launch for all sessions of a shape."""
        groups: dict[Shape, list[Ready]] = {}
        hosted: list[Session] = []
        for session in sessions:
            if self._is_on_host(session):
                hosted.append(session)
                continue
            shape = shape_of(session)
            ready = self._prepare(session, shape) if shape else None
            if shape and ready:
                groups.setdefault(shape, []).append(ready)
        for shape, members in groups.items():
            for first in range(0, len(members), MAX_BATCH):
                yield from self._draft(shape, members[first : first + MAX_BATCH])
        if hosted:
            yield from self._host_source().drafts(hosted)

    def release(self, session: Session) -> None:
        """Free what is kept of a session; idempotent."""
        state = self._states.pop(session.key, None)
        if state is not None and not state.shut:
            self._rows.close(state.slot)
        if session.key in self._on_host:
            self._on_host.discard(session.key)
            self._host_source().release(session)

    def _is_on_host(self, session: Session) -> bool:
        """A session stays where it began: its K/V is there."""
        if session.key in self._states:
            return False
        if session.key not in self._on_host and not covers(session.sampling, session.plan):
            self._on_host.add(session.key)
        return session.key in self._on_host

    def _host_source(self) -> HeadSource:
        if self._host is None:
            self._host = HeadSource(
                self.head,
                max_rows=self._max_rows,
                max_context=self._max_context,
                dtype=self._dtype,
                device=self._device,
            )
        return self._host

    def _prepare(self, session: Session, shape: Shape) -> Ready | None:
        """The rows to run for a draft; None if the session cannot be drafted."""
        state = self._absorb(session)
        live = len(session.tokens) - 2
        if state.shut or live < 0 or session.feature_end != live + 1:
            return None
        if live + min(shape.depth, session.room) > self._max_context:
            return None
        self._write_ahead(session, state, keep=1)
        if state.shut:
            return None
        # A chain is cut to the room; what it writes past the table is not kept.
        chain_rows = min(shape.depth, session.room) - 1
        drafted = chain_rows if shape.top_k == 1 else shape.draft_rows
        if not self._reserve(session, state, live + 1 + drafted):
            return None
        start = min(state.stable, live)
        return Ready(
            session=session,
            state=state,
            tokens=session.tokens.view[start + 1 : live + 2],
            features=state.features[-(live + 1 - start) :],
            start=start,
        )

    def _draft(self, shape: Shape, members: Sequence[Ready]) -> Iterator[Drafted]:
        most = max(len(ready.tokens) for ready in members)
        size, num_rows = bucket(len(members), ROW_BUCKETS), bucket(most, NEW_ROW_BUCKETS)
        result = self._launch(shape, members, size, num_rows)
        for ready in members:
            ready.state.stable = ready.start + len(ready.tokens)
            ready.state.features = ready.state.features[-1:]
        words = self._downloads.start(result).wait().numpy().copy()
        drafted: list[tuple[Session, Draft]] = []
        for row, ready in enumerate(members):
            if shape.top_k == 1:
                fitting = words[row, : min(shape.depth, ready.session.room)]
                drafted.append((ready.session, Draft(tree=DraftTree.chain(fitting))))
            else:
                drafted.append((ready.session, _tree(words[row])))
        yield drafted

    def _launch(self, shape: Shape, members: Sequence[Ready], size: int, num_rows: int) -> Tensor:
        """int32 [B, K] tokens of chains; [B, 3, n] tokens, parents and log-prob bits of trees."""
        rows, state = self._batch.fill(members, size, num_rows), self._rows.sampling

        def run() -> Tensor:
            if shape.top_k == 1:
                return self._program.chain(rows, state=state, length=shape.depth).tokens
            tree = self._program.tree(
                rows,
                state=state,
                num_nodes=shape.num_nodes,
                top_k=shape.top_k,
                depth=shape.depth,
            )
            bits = tree.logprobs.view(torch.int32)
            return torch.stack((tree.tokens, tree.parents, bits), dim=1)

        return self.graphs.run((shape, size, num_rows), run)

    def _absorb(self, session: Session) -> SessionRows:
        state = self._states.get(session.key)
        if state is None:
            empty = raw_array(torch.empty((0, self.feature_size), dtype=self._dtype))
            state = self._states[session.key] = SessionRows(-1, empty)
            try:
                state.slot = self._rows.open(session.sampling)
            except ResourceExhaustedError as error:
                _log_shut(session, error.reason)
        if session.pending:
            if not state.shut:
                fresh = [_feature_rows(wire, self._dtype) for wire in session.pending]
                state.features = np.concatenate([state.features, *fresh])
            session.pending.clear()
        return state

    def _write_ahead(self, session: Session, state: SessionRows, *, keep: int) -> None:
        """Write rows whose prediction nobody wants, but for the newest `keep`."""
        while True:
            start = state.stable
            known = min(state.fresh, len(session.tokens) - 1 - start)
            count = min(known - keep, _MAX_ROWS_PER_WRITE)
            if count <= 0 or (keep and known <= NEW_ROW_BUCKETS[-1]):
                return
            if start + count > self._max_context:
                self._shut(session, state, "context")
                return
            if not self._reserve(session, state, start + count):
                return
            first = 1 if start else 0
            self._write(
                state,
                session.tokens.view[start + 1 : start + count + 1],
                state.features[first : first + count],
            )
            state.features = state.features[first + count - 1 :]
            state.stable = start + count

    def _write(
        self, state: SessionRows, tokens: NDArray[np.int32], features: NDArray[np.generic]
    ) -> None:
        # From pageable memory: prompts come in many pieces, and no buffer must outlive a piece.
        count = len(tokens)
        words = np.concatenate((np.array([state.slot, count, state.stable], np.int32), tokens))
        staged = torch.from_numpy(words).to(self._device)
        rows = NewRows(
            slots=staged[0:1],
            tables=self._rows.tables,
            tokens=staged[3:].view(1, count),
            features=torch.from_numpy(features).view(self._dtype)[None].to(self._device),
            counts=staged[1:2],
            starts=staged[2:3],
        )
        self._program.write(rows)

    def _reserve(self, session: Session, state: SessionRows, rows: int) -> bool:
        try:
            self._rows.reserve(state.slot, rows, ceiling=session.max_len + MAX_DRAFT_TOKENS)
        except ResourceExhaustedError as error:
            self._shut(session, state, error.reason)
            return False
        return True

    def _shut(self, session: Session, state: SessionRows, why: str) -> None:
        """The session is not followed any more."""
        _log_shut(session, why)
        self._rows.close(state.slot)
        state.slot, state.stable = -1, 0
        state.features = state.features[:0]


def _tree(words: NDArray[np.int32]) -> Draft:
    tokens, parents, bits = words
    count = int(np.count_nonzero(parents != PADDING_NODE))
    tree = DraftTree(
        tokens=tokens[:count], parents=parents[:count], logprobs=bits[:count].view(np.float32)
    )
    return Draft(tree=tree)


def _feature_rows(wire: WireTensor, dtype: torch.dtype) -> NDArray[np.generic]:
    if wire.dtype is _WIRE_DTYPES.get(dtype):
        return wire.data.view(np.int16) if dtype is torch.bfloat16 else wire.data
    data = np.require(wire.data, requirements=("C", "W"))
    if wire.dtype is TensorDtype.BFLOAT16:
        return raw_array(torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).to(dtype))
    return raw_array(torch.from_numpy(data).to(dtype))


def _log_shut(session: Session, why: str) -> None:
    logger.info("session not drafted", extra={"session": session.session_id, "why": why})
