"""Session streams of routers: sessions opened and closed, and one message of events per round.

The transport sends the heartbeats. If a router is silent, `receive` raises ConnectionLostError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.logprobs import PathLogprobs
from outrider.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidMessageError,
    OutriderError,
    ResourceExhaustedError,
)
from outrider.ids import DrafterId, SessionId
from outrider.transport.interface import ServingConnection
from outrider.transport.send_queue import SendQueue
from outrider.transport.session_stream import make_failure
from outrider.wire.messages import (
    EventLogprobs,
    Heartbeat,
    MalformedOpen,
    SessionEvents,
    SessionLeave,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionsDraining,
    SessionsMessage,
    SessionSpec,
    SessionsRequest,
)
from outrider.wire.rounds import owned_indices
from outrider_verifier.model_runner.grammar_preparation import GrammarPreparation
from outrider_verifier.server.session_spans import VerifierSpans
from outrider_verifier.state.commands import CloseSession, Command, OpenSession, SetDrafter
from outrider_verifier.state.effects import EventBatch

NO_ROUTER: Final = -1
_PLACES: Final = 1 << 24
"""Factor that encodes a ticket: ticket = n * _PLACES + index of the session in the registry's
arrays, where n is a number that is never reused."""
_FIRST_PLACES: Final = 64


@dataclass(frozen=True, slots=True)
class ServedSession:
    """The router that owns a session, and the handle by which this router names the session."""

    router: int
    """Number of the router's connection in this process, at least 0."""
    handle: int
    session_id: SessionId


class SessionRegistry:
    """Sessions that are served or being opened, by ticket."""

    def __init__(self) -> None:
        self._served: dict[int, ServedSession] = {}
        self._numbers = itertools.count(1)
        self._free: list[int] = []
        """Array indices that no session has."""
        self._tickets = np.empty(0, np.int64)
        """Ticket of the session at each array index. The other arrays are not valid at free
        indices."""
        self._routers = np.empty(0, np.int64)
        self._handles = np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self._served)

    def items(self) -> list[tuple[int, ServedSession]]:
        """Return pairs of ticket and session for all sessions."""
        return list(self._served.items())

    def __getitem__(self, ticket: int) -> ServedSession:
        return self._served[ticket]

    def get(self, ticket: int) -> ServedSession | None:
        """Return the session with this ticket; None if it is not registered."""
        return self._served.get(ticket)

    def add(self, served: ServedSession) -> int:
        """Add a session and return its ticket. A ticket is never reused."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        ticket = next(self._numbers) * _PLACES + place
        self._tickets[place], self._routers[place] = ticket, served.router
        self._handles[place] = served.handle
        self._served[ticket] = served
        return ticket

    def pop(self, ticket: int) -> ServedSession | None:
        """Remove the session with this ticket and return it; return None if it is not
        registered."""
        served = self._served.pop(ticket, None)
        if served is not None:
            place = ticket % _PLACES
            self._tickets[place] = NO_ROUTER
            self._free.append(place)
        return served

    def owners(self, tickets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the connection number of each session's router, int64 [n], and the handle of each
        session, uint32 [n]. The number is NO_ROUTER for sessions that are no longer served. All
        `tickets` must come from `add`."""
        places = tickets % _PLACES
        there = self._tickets[places] == tickets
        return np.where(there, self._routers[places], NO_ROUTER), self._handles[places]

    def _grow(self) -> None:
        held = len(self._tickets)
        more = max(_FIRST_PLACES, held)
        self._tickets = np.concatenate([self._tickets, np.full(more, NO_ROUTER, np.int64)])
        self._routers = np.concatenate([self._routers, np.zeros(more, np.int64)])
        self._handles = np.concatenate([self._handles, np.zeros(more, np.uint32)])
        self._free.extend(reversed(range(held, held + more)))


def split_by_router(
    batch: EventBatch, routers: NDArray[np.int64], handles: NDArray[np.uint32]
) -> Iterator[tuple[int, SessionEvents]]:
    """Yield pairs of a router's connection number and the events of its sessions, in their order in
    `batch`. `routers` is the connection number for each event, int64 [n]; negative for events
    without a router, which are skipped. `handles` is the handle of each event's session, uint32
    [n]."""
    order = np.argsort(routers, kind="stable")
    owners = routers[order]
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(owners)]
    columns, tokens = batch.columns(), np.array(batch.tokens, np.int32)
    if len(edges) > 2:
        tokens = tokens[owned_indices(columns[2], order)]
        columns, handles = columns[:, order], handles[order]
    _, round_ids, counts, reasons, flags, proposed, accepted = columns
    round_ids, counts = round_ids.astype(np.uint32), counts.astype(np.uint32)
    reasons, flags = reasons.astype(np.uint8), flags.astype(np.uint8)
    proposed, accepted = proposed.astype(np.uint16), accepted.astype(np.uint16)
    ends = [0, *counts.cumsum().tolist()]
    for first, end in pairwise(edges):
        if first == end or owners[first] < 0:
            continue
        mine = slice(first, end)
        yield (
            int(owners[first]),
            SessionEvents(
                handles=handles[mine],
                round_ids=round_ids[mine],
                counts=counts[mine],
                tokens=tokens[ends[first] : ends[end]],
                finish_reasons=reasons[mine],
                flags=flags[mine],
                proposed=proposed[mine],
                accepted=accepted[mine],
                logprobs=_logprobs(batch.logprobs, order[mine]) if batch.logprobs else None,
                cached_tokens=(
                    _cached_tokens(batch.cached_tokens, order[mine])
                    if batch.cached_tokens
                    else None
                ),
            ),
        )


def _logprobs(told: dict[int, PathLogprobs], rows: NDArray[np.intp]) -> EventLogprobs | None:
    """Return the log-probabilities of the events with indices `rows` as columns; None if none of
    them has any. `told` maps indices of events to their log-probabilities."""
    mine = [told.get(row) for row in rows.tolist()]
    entries = [entry for entry in mine if entry is not None]
    if not entries:
        return None
    return EventLogprobs(
        widths=np.array([0 if e is None else e.values.shape[1] for e in mine], np.uint8),
        values=np.concatenate([entry.values.ravel() for entry in entries]),
        top_ids=np.concatenate([entry.top_ids.ravel() for entry in entries]),
    )


def _cached_tokens(told: dict[int, int], rows: NDArray[np.intp]) -> NDArray[np.uint32] | None:
    """Return the cached prompt tokens of the events with indices `rows`; None if all are 0. `told`
    maps indices of events to the numbers that are not 0."""
    mine = np.array([told.get(row, 0) for row in rows.tolist()], np.uint32)
    return mine if mine.any() else None


logger = logging.getLogger(__name__)

MAX_OPENING = 1024
"""Maximum number of sessions of one router that wait for the engine to open them. Further sessions
are refused."""
MAX_UNREAD_BYTES = 8 << 20
"""Maximum number of unsent bytes for a router. A router for which more bytes wait is
disconnected."""
_MESSAGE_BYTES = 256


def _size(message: SessionsMessage) -> int:
    if isinstance(message, SessionEvents):
        told = message.logprobs
        extra = 0 if told is None else told.values.nbytes + told.top_ids.nbytes
        return _MESSAGE_BYTES + message.tokens.nbytes + 20 * len(message.handles) + extra
    return _MESSAGE_BYTES


@dataclass(slots=True, eq=False)
class _Router:
    """One connected router, its sessions and its unsent messages."""

    number: int
    connection: ServingConnection
    outgoing: SendQueue[SessionsMessage]
    tickets: dict[int, int] = field(default_factory=dict)
    """Ticket of each session of the router that is served or being opened, by handle."""
    opening: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the connection, because the router does not read."""


class RouterStreams:
    """Session streams of all connected routers. Asyncio thread only."""

    def __init__(
        self,
        *,
        post: Callable[[Command], None],
        admit: Callable[[], None],
        on_change: Callable[[int], None],
        grammars: GrammarPreparation,
    ) -> None:
        """Create an object without connections. `post` passes a command to the engine thread.
        `admit` raises an error if no session may be opened. `on_change` is called with the new
        number of sessions when it changes. `grammars` compiles the grammars of structured
        outputs."""
        self._grammars = grammars
        self._compiling: dict[int, asyncio.Task[None]] = {}
        """Running grammar compilations, by ticket of the session that is opened afterwards."""
        self._post = post
        self._admit = admit
        self._on_change = on_change
        self._served = SessionRegistry()
        self._moving: dict[int, tuple[DrafterId | None] | None] = {}
        """Sessions for which the engine has not confirmed a move to another drafter, by ticket. The
        value is a 1-tuple with the drafter of the next move, or None if no further move was
        requested."""
        self._numbers = itertools.count()
        self._routers: dict[int, _Router] = {}
        """Connected routers by connection number."""
        self._spans = VerifierSpans()
        self._drains_until: float | None = None
        """Deadline of the drain on the event loop's clock; None if the verifier does not drain."""
        self.counters: Counter[str] = Counter()
        """Counters for metrics, which never decrease."""
        self.compilations = 0
        """Number of grammar compilations that have ended, including failed ones."""

    @property
    def num_sessions(self) -> int:
        """Number of sessions that are served or being opened."""
        return len(self._served)

    @property
    def num_moves(self) -> int:
        """Number of sessions that the engine has not yet moved to another drafter as requested."""
        return len(self._moving)

    async def serve_router(self, connection: ServingConnection) -> None:
        """Serve one router until its stream ends. Then close all its sessions."""
        router = _Router(next(self._numbers), connection, SendQueue(connection, size_of=_size))
        self._routers[router.number] = router
        if self._drains_until is not None:
            self._tell_of_drain(router, self._drains_until)
        tasks = [
            asyncio.ensure_future(self._receive_all(router)),
            asyncio.ensure_future(router.outgoing.run_sender()),
            asyncio.ensure_future(router.lost.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            router.lost.set()
            for task in tasks:
                task.cancel()
            for handle in list(router.tickets):
                self._leave(router, handle)
            del self._routers[router.number]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OutriderError):
                logger.error("a router's stream failed", exc_info=result, extra=_facts(router))

    def announce_drain(self, seconds: float) -> None:
        """Announce a drain to all present and future routers: sessions end in `seconds` seconds."""
        self._drains_until = asyncio.get_running_loop().time() + seconds
        for router in self._routers.values():
            self._tell_of_drain(router, self._drains_until)

    def fail_all_sessions(self, error: OutriderError) -> None:
        """End all remaining sessions with `error`."""
        for ticket, served in self._served.items():
            self.fail_session(ticket, error)
            self._post(CloseSession(served.session_id, ticket))

    def send_events(self, batch: EventBatch) -> None:
        """Send the events of a round in one message to each router whose sessions are concerned."""
        if self._spans.traced:
            self._spans.record_events(batch)
        tickets, reasons = batch.tickets, batch.reasons
        # A session that its router has left is nobody's; its Close is on the way.
        for number, events in split_by_router(batch, *self._served.owners(tickets)):
            self._tell(self._routers[number], events)
        for ticket in tickets[reasons > 0].tolist():
            self._forget(ticket)

    def fail_session(self, ticket: int, error: OutriderError) -> None:
        """Report to the session's router that the session was refused or has failed."""
        self._spans.end_span(ticket, error)
        served = self._forget(ticket)
        if served is not None:
            facts = {"session_id": served.session_id, "reason": error.reason}
            router = self._routers[served.router]
            logger.info("session refused or failed", extra=facts | _facts(router))
            self._tell(router, make_failure(served.handle, error))

    def announce_drafter(self, ticket: int, drafter_id: DrafterId | None) -> None:
        """Report to the session's router which drafter the session has after a move. If another
        move was requested meanwhile, begin it instead."""
        served, wish = self._served.get(ticket), self._moving.pop(ticket, None)
        if served is None:
            return
        router = self._routers[served.router]
        if wish is not None:
            self._move(router, served.handle, *wish)
        else:
            self._tell(router, SessionMoved(served.handle, drafter_id))

    async def _receive_all(self, router: _Router) -> None:
        while True:
            try:
                message = await router.connection.receive()
            except InvalidMessageError as error:
                self.counters["messages_invalid"] += 1
                logger.debug("invalid message: %s", error.message, extra=_facts(router))
                continue
            for request in (message, *router.connection.receive_ready()):
                self._take(router, request)

    def _take(self, router: _Router, request: SessionsRequest | MalformedOpen) -> None:
        match request:
            case SessionOpen(handle=handle, spec=spec):
                try:
                    self._open(router, handle, spec)
                except OutriderError as error:
                    self._tell(router, make_failure(handle, error))
            case MalformedOpen(handle=handle, error=malformed):
                self.counters["messages_invalid"] += 1
                self._tell(router, make_failure(handle, malformed))
            case SessionLeave(handle=handle):
                self._leave(router, handle)
            case SessionMove(handle=handle, drafter_id=drafter_id):
                self._move(router, handle, drafter_id)
            case Heartbeat():
                pass

    def _open(self, router: _Router, handle: int, spec: SessionSpec) -> None:
        if handle in router.tickets:
            raise AlreadyExistsError(f"handle {handle} is in use", reason="HANDLE_EXISTS")
        self._admit()
        if router.opening >= MAX_OPENING:
            raise ResourceExhaustedError(
                f"{MAX_OPENING} sessions are being opened", reason="OPENING_EXHAUSTED"
            )
        ticket = self._served.add(ServedSession(router.number, handle, spec.session_id))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        router.tickets[handle] = ticket
        router.opening += 1
        self._on_change(len(self._served))
        self._spans.start_span(ticket, spec)
        answer.add_done_callback(partial(self._answered, router, ticket))
        known = self._grammars.get_cached(spec)
        if known is not None:
            self._post(OpenSession(ticket, spec, answer, *known, self._grammars.token_bytes))
            return
        # Nobody else's rounds wait for it.
        task = asyncio.ensure_future(self._compile(ticket, spec, answer))
        self._compiling[ticket] = task
        task.add_done_callback(lambda _: self._compiling.pop(ticket, None))

    async def _compile(self, ticket: int, spec: SessionSpec, answer: asyncio.Future[None]) -> None:
        """Compile a session's grammar, then open the session in the engine. `answer` receives an
        error of the compilation."""
        try:
            prepared = await self._grammars.begin(spec)
        except asyncio.CancelledError:
            # Its router has left it.
            answer.set_result(None)
            raise
        except OutriderError as error:
            answer.set_exception(error)
            return
        except Exception as bug:
            logger.exception("a grammar could not be compiled")
            answer.set_exception(InternalError(f"{type(bug).__name__}: {bug}", reason="GRAMMAR"))
            return
        finally:
            self.compilations += 1
        served = self._served.get(ticket)
        if served is None:
            # Its router has left it.
            answer.set_result(None)
            return
        self._post(OpenSession(ticket, spec, answer, prepared, self._grammars.token_bytes))
        del self._compiling[ticket]
        wish = self._moving.pop(ticket, None)
        if wish is not None:
            self._move(self._routers[served.router], served.handle, *wish)

    def _answered(self, router: _Router, ticket: int, answer: asyncio.Future[None]) -> None:
        router.opening -= 1
        error = answer.exception()
        if isinstance(error, OutriderError):
            self.fail_session(ticket, error)

    def _move(self, router: _Router, handle: int, drafter_id: DrafterId | None) -> None:
        ticket = router.tickets.get(handle)
        if ticket is None:
            return
        if ticket in self._moving or ticket in self._compiling:
            # One at a time for the engine; of several wishes the last one counts.
            self._moving[ticket] = (drafter_id,)
            return
        self._moving[ticket] = None
        self._post(SetDrafter(self._served[ticket].session_id, ticket, drafter_id))

    def _leave(self, router: _Router, handle: int) -> None:
        ticket = router.tickets.get(handle)
        served = None if ticket is None else self._forget(ticket)
        if ticket is not None and served is not None:
            self._post(CloseSession(served.session_id, ticket))

    def _forget(self, ticket: int) -> ServedSession | None:
        served = self._served.pop(ticket)
        self._moving.pop(ticket, None)
        compiling = self._compiling.get(ticket)
        if compiling is not None:
            compiling.cancel()
        self._spans.end_span(ticket)
        if served is not None:
            del self._routers[served.router].tickets[served.handle]
            self._on_change(len(self._served))
        return served

    def _tell_of_drain(self, router: _Router, until: float) -> None:
        seconds = max(0.0, until - asyncio.get_running_loop().time())
        self._tell(router, SessionsDraining(seconds))

    def _tell(self, router: _Router, message: SessionsMessage) -> None:
        if router.lost.is_set():
            return
        with contextlib.suppress(OutriderError):  # whoever receives hears of the loss
            router.outgoing.put_messages(message)
        if router.outgoing.size > MAX_UNREAD_BYTES:
            self.counters["routers_overflowed"] += 1
            logger.warning("router does not read; disconnecting", extra=_facts(router))
            router.lost.set()


def _facts(router: _Router) -> dict[str, object]:
    return {"peer": router.connection.peer, "sessions": len(router.tickets)}
