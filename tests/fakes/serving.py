"""Streams of sessions for fake verifiers, whose sessions are generators of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from outrider.errors import InvalidMessageError
from outrider.ids import DrafterId
from outrider.transport.in_process import open_local_sessions
from outrider.transport.interface import RouterConnection, ServingConnection
from outrider.transport.session_stream import SessionIteratorMixin, make_failure
from outrider.wire.logprobs import EventLogprobs, TokenLogprobs, pack_logprobs
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    REASON_CODES,
    TARGET_ONLY,
    MalformedOpen,
    SessionEvent,
    SessionEvents,
    SessionLeave,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionSpec,
    SpecStats,
)


class ServesGenerators(SessionIteratorMixin):
    """Serves every session that is opened from a generator of its own; mixed into a fake."""

    deaf = False
    """Whether it goes on with sessions that were left."""

    def run_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        """The events of a session; closed when its router leaves."""
        raise NotImplementedError

    def move_session(self, spec: SessionSpec, drafter_id: DrafterId | None) -> DrafterId | None:
        """Give a session to a drafter; who has it afterwards."""
        return spec.drafter_id

    async def sessions(self) -> RouterConnection:
        return open_local_sessions(self)  # type: ignore[arg-type]

    async def serve_sessions(self, connection: ServingConnection) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        specs: dict[int, SessionSpec] = {}
        try:
            while True:
                try:
                    message = await connection.receive()
                except InvalidMessageError:
                    continue
                match message:
                    case SessionOpen(handle=handle, spec=spec):
                        specs[handle] = spec
                        running[handle] = asyncio.create_task(self._serve(connection, handle, spec))
                    case MalformedOpen(handle=handle, error=error):
                        await connection.send(make_failure(handle, error))
                    case SessionLeave(handle=handle):
                        if not self.deaf:
                            running.pop(handle).cancel()
                    case SessionMove(handle=handle, drafter_id=drafter_id):
                        now = self.move_session(specs[handle], drafter_id)
                        await connection.send(SessionMoved(handle, now))
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _serve(self, connection: ServingConnection, handle: int, spec: SessionSpec) -> None:
        told = SpecStats()
        try:
            async with aclosing(self.run_session(spec)) as events:
                async for event in events:
                    await connection.send(one_row(handle, event, told))
                    told = event.stats
        except Exception as error:
            await connection.send(make_failure(handle, error))


def one_row(handle: int, event: SessionEvent, told: SpecStats) -> SessionEvents:
    """An event as a message; `told` is what the session's statistics were before."""
    stats, reason = event.stats, event.finish_reason
    flags = DRAFTER_ATTACHED * event.drafter_attached | flags_of_round(told, stats)
    return SessionEvents(
        handles=np.array([handle], np.uint32),
        round_ids=np.array([event.round_id], np.uint32),
        counts=np.array([len(event.tokens)], np.uint32),
        tokens=np.array(event.tokens, np.int32),
        finish_reasons=np.array([0 if reason is None else REASON_CODES[reason]], np.uint8),
        flags=np.array([flags], np.uint8),
        proposed=np.array([stats.proposed - told.proposed], np.uint16),
        accepted=np.array([stats.accepted - told.accepted], np.uint16),
        logprobs=_one_rows_logprobs(event.logprobs) if event.logprobs else None,
        cached_tokens=np.array([event.cached_tokens], np.uint32) if event.cached_tokens else None,
    )


def _one_rows_logprobs(entries: tuple[TokenLogprobs, ...]) -> EventLogprobs:
    values, top_ids = pack_logprobs(entries)
    return EventLogprobs(
        widths=np.array([1 + len(entries[0].top)], np.uint8),
        values=np.array(values, np.float32),
        top_ids=np.array(top_ids, np.int32),
    )


def flags_of_round(before: SpecStats, after: SpecStats) -> int:
    """What of one round between two states of the statistics is told by flags of its event, the
    planner's left out."""
    flags = FALLBACK if after.fallback_rounds > before.fallback_rounds else 0
    if after.target_only_rounds > before.target_only_rounds:
        flags |= TARGET_ONLY
    if after.look_ahead_rounds > before.look_ahead_rounds:
        flags |= LOOKED_AHEAD
    return flags | LOOK_AHEAD_HIT if after.hit_rounds > before.hit_rounds else flags
