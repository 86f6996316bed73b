"""Assigns device slots and KV blocks to followed sessions and brings them up to date.

Drafting itself is in `proposer`. A *device slot* is the index of a session in the tensors on
the device. Letters in shapes: B sessions of one launch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import MAX_DRAFT_TOKENS
from outrider_drafter.gpu.batch import LaunchSessions, ReadyRows
from outrider_drafter.gpu.draft_model import GpuDraftModel
from outrider_drafter.gpu.draft_slots import NO_SLOT, DraftSlotTable
from outrider_drafter.gpu.kv_writer import KVRowWriter
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.gpu.shapes import DraftTreeShape, ProposalShape, fit_shape, shape_of_session
from outrider_drafter.proposers.kv_proposer import KVProposer
from outrider_drafter.state.session import FollowedSession, SessionKey

logger = logging.getLogger(__name__)

_TREE_ROWS: Final = 2048
"""Number of draft rows that fit into a session's block table in addition to its context."""


class GpuProposerBase(KVProposer):
    """Base of `GpuProposer`: assigns device slots and KV blocks to sessions and prepares sessions
    for a launch."""

    def __init__(
        self,
        drafter: GpuDraftModel,
        *,
        max_rows: int,
        max_context: int,
        max_sessions: int,
        rows_with_draft: int,
        scratch_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        cuda_graphs: bool,
        bounded: bool,
    ) -> None:
        """See `GpuProposer`. `rows_with_draft`: see `KVProposer`. `scratch_blocks`: number of KV
        blocks that belong to no session."""
        super().__init__(
            drafter.feed,
            max_context=max_context or drafter.max_context,
            rows_with_draft=rows_with_draft,
            dtype=dtype,
            device=device,
        )
        self._bounded, self._buckets = bounded, drafter.buckets
        self.kv_rows = PagedDraftKV(
            drafter.kv,
            max_rows=max_rows,
            max_session_rows=self._max_context + _TREE_ROWS,
            max_sessions=max_sessions,
            scratch_blocks=scratch_blocks,
            dtype=dtype,
            device=self._device,
            vocabulary=drafter.vocabulary,
        )
        """KV cache for all sessions on the device and for outcome drafts."""
        self._program = LookAheadProgram(
            drafter.forward(self.kv_rows.storage, self.kv_rows.capacity)
        )
        self.graphs = GraphCache(self._device, enabled=cuda_graphs)
        self._writer = KVRowWriter(
            self._program.forward,
            self.kv_rows,
            self.graphs,
            dtype=dtype,
            device=self._device,
        )
        self._seats = DraftSlotTable()
        self._known: dict[SessionKey, int] = {}
        """Sessions that are followed on the device, with their slots in the session table."""

    def _previous_shape(self, session: FollowedSession) -> DraftTreeShape | None:
        """Return the shape last drafted for a session, or None if its plan has changed or the shape
        has too many levels now."""
        shapes = self._seats.shapes
        known = shapes[session.slot] if session.slot < len(shapes) else None
        if (
            known is None
            or known[0] is not session.plan
            or session.draft_levels_left < known[1].depth
        ):
            return None
        return known[1]

    def _new_shape(self, session: FollowedSession) -> DraftTreeShape | None:
        """Return the draft shape for a session, computed from its plan and its remaining levels, or
        None if nothing can be drafted."""
        seat = int(self._seats.seats[session.slot])
        self._seats.describe_session(session, warps=self.kv_rows.warp.has_logits_processing(seat))
        shape = shape_of_session(session)
        if shape is not None and self._bounded:
            shape = fit_shape(shape, self._buckets.chains)
        if shape is not None and session.draft_levels_left >= shape.depth:
            self._seats.shapes[session.slot] = (session.plan, shape)
        return shape

    def _prepare(
        self,
        members: Sequence[FollowedSession],
        shape: DraftTreeShape | ProposalShape,
        *,
        or_shut: bool = True,
    ) -> Sequence[FollowedSession]:
        """Prepare sessions for a launch of this shape and return those that can be drafted. If
        there is no KV memory for a session, it is left out and, with `or_shut`, no longer
        followed."""
        table, seats = members[0].table, self._seats
        slots = np.array([session.slot for session in members])
        live = self._live_rows(table, slots)
        depths = np.minimum(shape.depth, table.draft_levels_left(slots))
        fit = self._can_draft(table, slots, live, depths)
        slots, live, depths = slots[fit], live[fit], depths[fit]
        for slot in slots[live + 1 - seats.stable[slots] > self._rows_with_draft].tolist():
            self._write_ahead(table.session_in(slot), keep=1)
        rows = live + 1 + shape.rows_needed(depths)
        for index in np.flatnonzero(rows > seats.room[slots]).tolist():
            session = table.session_in(int(slots[index]))
            if seats.seats[session.slot] == NO_SLOT:
                continue
            if or_shut:
                self._reserve(session, int(rows[index]))
            else:
                self._try_reserve(session, int(rows[index]))
        seated = (seats.seats[slots] != NO_SLOT) & (rows <= seats.room[slots])
        if len(slots) == len(members) and bool(seated.all()):
            return members
        return [table.session_in(slot) for slot in slots[seated].tolist()]

    def _try_reserve(self, session: FollowedSession, rows: int) -> None:
        with suppress(ResourceExhaustedError):
            self._reserve_blocks(session, rows, session.max_len + MAX_DRAFT_TOKENS)

    def _ready(self, members: LaunchSessions) -> ReadyRows:
        """Return the rows that a launch must run; see `_prepare`."""
        live = self._live_rows(members.table, members.slots)
        starts = np.minimum(self._seats.stable[members.slots], live)
        return ReadyRows(members, starts, live + 1 - starts)

    def _follows(self, session: FollowedSession) -> bool:
        if session.key not in self._known:
            self._known[session.key] = session.slot
            self._seats.ensure_size(session.slot + 1)
            self._seats.stable[session.slot] = self._seats.room[session.slot] = 0
            self._seats.counted[session.slot] = 0
            self._seats.seats[session.slot] = NO_SLOT
            self._seats.shapes[session.slot] = None
            try:
                self._seats.seats[session.slot] = self.kv_rows.open_slot(session.sampling)
            except ResourceExhaustedError as error:
                logger.info(
                    "session not drafted",
                    extra={"session_id": session.session_id, "why": error.reason},
                )
                session.table.features.drop_slot(session.slot)
        return bool(self._seats.seats[session.slot] != NO_SLOT)

    def _stable(self, session: FollowedSession) -> int:
        return int(self._seats.stable[session.slot])

    def _reserve_blocks(self, session: FollowedSession, rows: int, ceiling: int) -> None:
        seat = int(self._seats.seats[session.slot])
        self.kv_rows.reserve(seat, rows, ceiling=ceiling)
        self._seats.room[session.slot] = self.kv_rows.num_reserved(seat)

    def _write(
        self,
        session: FollowedSession,
        start: int,
        tokens: NDArray[np.int32],
        features: NDArray[np.generic],
    ) -> None:
        self._writer.write_rows(int(self._seats.seats[session.slot]), start, tokens, features)
        self._seats.stable[session.slot] = start + len(tokens)

    def _forget(self, session: FollowedSession) -> None:
        """Free the device state of a session; idempotent."""
        if session.key in self._known:
            del self._known[session.key]
            if self._seats.seats[session.slot] != NO_SLOT:
                self._give_up(session)

    def _give_up(self, session: FollowedSession) -> None:
        self.kv_rows.close_slot(int(self._seats.seats[session.slot]))
        self._seats.seats[session.slot] = NO_SLOT
        self._seats.stable[session.slot] = self._seats.room[session.slot] = 0
        self._seats.shapes[session.slot] = None
