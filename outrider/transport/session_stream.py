"""Client of a verifier's session stream, with a listener or an iterator for each session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from outrider.errors import (
    ConnectionLostError,
    InternalError,
    InvalidMessageError,
    OutriderError,
)
from outrider.ids import DrafterId
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.error_codec import ErrorStatus, from_status, to_status
from outrider.transport.interface import RouterConnection
from outrider.transport.send_queue import SendQueue
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    MALFORMED_ROW,
    PLANNED,
    REASONS,
    TARGET_ONLY,
    Heartbeat,
    SessionEvent,
    SessionEvents,
    SessionFailure,
    SessionLeave,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionsDraining,
    SessionsMessage,
    SessionSpec,
    SessionsRequest,
    SpecStats,
)
from outrider.wire.spec_stats_accumulator import add_round

logger = logging.getLogger(__name__)

ListenerT = TypeVar("ListenerT", bound="SessionListener")


class SessionListener(Protocol):
    """Callbacks for one session on a session stream."""

    def fail_session(self, error: OutriderError) -> None:
        """Handle the end of a session that was refused, failed, or lost its stream."""
        ...

    def handle_drafter_change(self, drafter_id: DrafterId | None) -> None:
        """Handle the result of a drafter change. `drafter_id` is the drafter that the session has
        now, whether or not the change succeeded; None means no drafter."""
        ...


EventSink = Callable[[SessionEvents, Mapping[int, ListenerT]], None]
"""Function that is called with a message of events and the listeners of all sessions by handle. A
session that was left has no listener."""


class OpenedSession(Protocol):
    """Handle of a session that was opened on a stream."""

    def leave_session(self) -> None:
        """Stop listening and end the session if it still runs. Idempotent."""
        ...

    def request_drafter(self, drafter_id: DrafterId | None) -> None:
        """Ask the verifier to change the session's drafter, or to remove it with None. The listener
        is called with the result unless the session ends first."""
        ...


class SessionStream(Generic[ListenerT]):
    """The sessions that one process has opened at one verifier, over one connection.

    The stream connects when the first session is opened, and reconnects for the next session after
    a connection was lost. All sessions of a lost connection fail.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[RouterConnection]],
        deliver: EventSink[ListenerT],
        *,
        on_lost: Callable[[OutriderError], None] = lambda _: None,
        on_draining: Callable[[float], None] = lambda _: None,
        lasting: bool = True,
    ) -> None:
        """`deliver` is called with all events. If `lasting` is false, the connection is closed
        after its last session has ended. `on_lost` is called when a connection broke or could not
        be made, before its sessions fail. `on_draining` is called with the number of seconds after
        which the verifier will stop."""
        self._connect = connect
        self._hooks = _Hooks(deliver, on_lost, on_draining)
        self._lasting = lasting
        self._handles = itertools.count(1)
        self._live: _LiveConnection[ListenerT] | None = None

    def open_session(self, spec: SessionSpec, listener: ListenerT) -> OpenedSession:
        """Open a session.

        Errors are not raised but passed to the listener, among them UnavailableError if the
        verifier cannot be reached.
        """
        live = self._live
        if live is None or live.lost:
            live = self._live = _LiveConnection(self._connect, self._hooks)
        handle = next(self._handles)
        live.listeners[handle] = listener
        live.send_message(SessionOpen(handle, spec))
        return _Opened(self, live, handle)

    def close_in_background(self) -> None:
        """Close the connection in the background. Open sessions fail immediately."""
        live, self._live = self._live, None
        if live is not None and not live.lost:
            live.hang_up()

    async def close(self) -> None:
        """Close the connection and wait until it is closed. Open sessions fail."""
        live, self._live = self._live, None
        if live is not None:
            await live.close()

    def leave(self, live: _LiveConnection[ListenerT], handle: int) -> None:
        """Stop listening to the session with this handle, and end it if it still runs."""
        if live.listeners.pop(handle, None) is not None:
            live.send_message(SessionLeave(handle))
        if not (self._lasting or live.listeners) and live is self._live:
            self.close_in_background()


@dataclass(frozen=True, slots=True)
class _Hooks(Generic[ListenerT]):
    """Callbacks of a connection, apart from the listeners of sessions."""

    deliver: EventSink[ListenerT]
    on_lost: Callable[[OutriderError], None]
    on_draining: Callable[[float], None]


class _Opened(Generic[ListenerT]):
    def __init__(
        self, stream: SessionStream[ListenerT], live: _LiveConnection[ListenerT], handle: int
    ) -> None:
        self._stream, self._live, self._handle = stream, live, handle

    def leave_session(self) -> None:
        self._stream.leave(self._live, self._handle)

    def request_drafter(self, drafter_id: DrafterId | None) -> None:
        if self._handle in self._live.listeners:
            self._live.send_message(SessionMove(self._handle, drafter_id))


class _LiveConnection(Generic[ListenerT]):
    """One connection, from the start of the attempt to connect, and its open sessions."""

    def __init__(
        self, connect: Callable[[], Awaitable[RouterConnection]], hooks: _Hooks[ListenerT]
    ) -> None:
        self.listeners: dict[int, ListenerT] = {}
        self.lost = False
        """Whether the connection is lost or closed. No session is opened on it, and later messages
        are ignored."""
        self._connect = connect
        self._hooks = hooks
        self._early: list[SessionsRequest] = []
        """Messages to send as soon as there is a connection."""
        self._outgoing: SendQueue[SessionsRequest] | None = None
        self._task = asyncio.create_task(self._run(), name="outrider-sessions")

    def send_message(self, message: SessionsRequest) -> None:
        """Send a message. If the connection is lost, the reading task informs the listeners."""
        if self._outgoing is None:
            self._early.append(message)
            return
        with contextlib.suppress(OutriderError):
            self._outgoing.put_messages(message)

    def hang_up(self) -> None:
        """Close the connection without waiting; messages that were queued before are still sent."""
        self._lose(ConnectionLostError("the stream is closed", reason="CLOSED"))
        closing = asyncio.create_task(self.close())
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)

    async def close(self) -> None:
        """Close the connection, even if it is not connected yet, and wait until it is closed."""
        self.lost = True
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _run(self) -> None:
        error: OutriderError = ConnectionLostError("the stream is closed", reason="CLOSED")
        connection: RouterConnection | None = None
        try:
            connection = await self._connect()
            await self._serve(connection)
        except InvalidMessageError as malformed:
            # It is unknown which sessions lost events, so all fail.
            error = ConnectionLostError(malformed.message, reason="INVALID_EVENTS")
        except OutriderError as lost:
            error = lost
        except Exception:
            logger.exception("events could not be delivered")
            error = InternalError("internal error", reason="INTERNAL")
        finally:
            # Inform the listeners first, because closing may take long if the peer does not
            # answer.
            self._end(error)
            if connection is not None:
                await connection.close()

    async def _serve(self, connection: RouterConnection) -> None:
        self._outgoing = SendQueue(connection)
        self._outgoing.put_messages(*self._early)
        writer = asyncio.create_task(self._outgoing.run_sender(), name="outrider-sessions-write")
        try:
            while True:
                message = await connection.receive()
                for one in (message, *connection.receive_ready()):
                    self._hear(one)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _hear(self, message: SessionsMessage) -> None:
        if self.lost:
            return
        match message:
            case SessionEvents():
                self._take(message)
            case SessionFailure():
                self._fail(message.handle, _error_of(message))
            case SessionMoved():
                listener = self.listeners.get(message.handle)
                if listener is not None:
                    listener.handle_drafter_change(message.drafter_id)
            case SessionsDraining():
                self._hooks.on_draining(message.seconds)
            case Heartbeat():
                pass

    def _take(self, events: SessionEvents) -> None:
        self._hooks.deliver(events, self.listeners)
        if not events.finish_reasons.any():
            return
        for row in events.finish_reasons.nonzero()[0].tolist():
            handle = int(events.handles[row])
            if events.finish_reasons[row] == MALFORMED_ROW:
                self.send_message(SessionLeave(handle))
                self._fail(handle, InternalError("malformed events", reason="INVALID_EVENTS"))
            else:
                self.listeners.pop(handle, None)

    def _fail(self, handle: int, error: OutriderError) -> None:
        listener = self.listeners.pop(handle, None)
        if listener is not None:
            listener.fail_session(error)

    def _end(self, error: OutriderError) -> None:
        """Handle the end of the connection. `on_lost` is not called if this side closed it."""
        if not self.lost:
            self.lost = True
            self._hooks.on_lost(error)
        self._lose(error)

    def _lose(self, error: OutriderError) -> None:
        self.lost = True
        while self.listeners:
            _handle, listener = self.listeners.popitem()
            listener.fail_session(error.copy())


_CLOSING: set[asyncio.Task[None]] = set()
"""Tasks that close connections in the background."""


def make_failure(handle: int, error: BaseException) -> SessionFailure:
    """Return the message that informs a router that a session has failed."""
    status = to_status(error)
    return SessionFailure(
        handle=handle,
        code=status.code,
        kind=status.kind,
        message=status.message,
        reason=status.reason,
        retry_after_s=status.retry_after_s,
    )


def _error_of(failure: SessionFailure) -> OutriderError:
    return from_status(
        ErrorStatus(
            code=failure.code,
            kind=failure.kind,
            message=failure.message,
            reason=failure.reason,
            retry_after_s=failure.retry_after_s,
        )
    )


class _Followed:
    """State of one session that is read through an iterator."""

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.stats = SpecStats()
        # Bounded by the tokens that the session may emit.
        self.events: BoundedQueue[SessionEvent] = BoundedQueue(max_items=spec.max_new_tokens + 2)

    def fail_session(self, error: OutriderError) -> None:
        """End the iteration with `error`, after the events that arrived before."""
        self.events.close(error)

    def handle_drafter_change(self, drafter_id: DrafterId | None) -> None:
        """Ignore the change: the iterator does not report drafters."""


class SessionIteratorMixin:
    """Mixin that adds the async generator `open_session` to a class that implements `sessions`."""

    _followed: SessionStream[_Followed] | None = None

    async def sessions(self) -> RouterConnection:
        """Open a session stream to the verifier."""
        raise NotImplementedError

    async def open_session(self, spec: SessionSpec) -> AsyncGenerator[SessionEvent]:
        """Open a session and yield its events. Errors are raised by the first step; closing the
        generator ends the session."""
        if self._followed is None:
            self._followed = SessionStream(self.sessions, _deliver, lasting=False)
        followed = _Followed(spec)
        opened = self._followed.open_session(spec, followed)
        try:
            while True:
                event = await followed.events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            opened.leave_session()


def _deliver(events: SessionEvents, listeners: Mapping[int, _Followed]) -> None:
    start = 0
    counts = events.counts.tolist()
    told = [] if events.logprobs is None else list(events.logprobs.split_rows(counts))
    for row, (handle, count) in enumerate(zip(events.handles.tolist(), counts, strict=True)):
        end = start + count
        followed = listeners.get(handle)
        if followed is not None and events.finish_reasons[row] != MALFORMED_ROW:
            tokens = tuple(events.tokens[start:end].tolist())
            event = _event(events, row, tokens, followed)
            if told:
                event = replace(event, logprobs=tuple(told[row]))
            if not followed.events.try_put(event):
                followed.fail_session(
                    InternalError("more events than tokens", reason="INVALID_EVENTS")
                )
        start = end


def _event(
    events: SessionEvents, row: int, tokens: tuple[int, ...], followed: _Followed
) -> SessionEvent:
    round_id, flags = int(events.round_ids[row]), int(events.flags[row])
    if round_id and tokens:
        followed.stats = add_round(
            followed.stats,
            proposed=int(events.proposed[row]),
            accepted_len=int(events.accepted[row]),
            emitted=len(tokens),
            fallback=bool(flags & FALLBACK),
            target_only=bool(flags & TARGET_ONLY),
            planned=flags & PLANNED,
            looked_ahead=bool(flags & LOOKED_AHEAD),
            hit=bool(flags & LOOK_AHEAD_HIT),
        )
    return SessionEvent(
        session_id=followed.spec.session_id,
        epoch=followed.spec.epoch,
        round_id=round_id,
        tokens=tokens,
        finish_reason=REASONS[events.finish_reasons[row]],
        stats=followed.stats,
        drafter_attached=bool(flags & DRAFTER_ATTACHED),
        cached_tokens=0 if events.cached_tokens is None else int(events.cached_tokens[row]),
    )
