"""The actor around an endpoint. Every method answers, or waits for a bounded time only."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

from outrider.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    NotFoundError,
    OutriderError,
)
from outrider.transport.base import VerifierConnection
from outrider.transport.framed import verifier_end
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.transport.ray.frames import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    Batch,
    Frame,
    Inlet,
    closed_error,
    frame_mailbox,
    pack_frames,
)
from outrider.transport.ray.options import RayConfig
from outrider.transport.sessions import SessionMailbox, pump_events, session_mailbox
from outrider.transport.status import ErrorStatus, to_status, typed
from outrider.wire.codec import (
    decode_close_session,
    decode_session_spec,
    decode_set_plan,
    decode_verifier_address,
    encode_drafter_info,
    encode_session_message,
    encode_verifier_info,
)

EndpointFactory = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes an endpoint within its actor; leaving the context stops it."""

_MAX_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a call, or its typed error."""

    value: Any = None
    error: ErrorStatus | None = None


class HostFrames:
    """The actor's end of an exchange: filled by pushes, emptied by pulls."""

    def __init__(self, peer: str, config: RayConfig) -> None:
        self._peer = peer
        self._inbox = frame_mailbox()
        self._outbox = frame_mailbox()
        self._inlet = Inlet(self._inbox, config.control_timeout_s)
        self._bulk_bytes = config.bulk_bytes
        self._pulls = itertools.count()

    @property
    def peer(self) -> str:
        """Name of the dialing side."""
        return self._peer

    async def send(self, frame: bytes) -> None:
        """Queue a frame for the next pull."""
        await self._outbox.put(frame)

    def offer(self, *frames: bytes) -> bool:
        """Queue frames if there is room now."""
        return self._outbox.offer(*frames)

    async def receive(self) -> Frame:
        """The next pushed frame."""
        return await self._inbox.get()

    def ready(self) -> list[Frame]:
        """The frames that have arrived."""
        return self._inbox.take_all()

    async def close(self) -> None:
        """Let the dialing side pull what is left, then tell it that this is the end."""
        self.end(ConnectionLostError("the verifier ended the exchange", reason="PEER_CLOSED"))

    def end(self, error: OutriderError) -> None:
        """Like `close`, with the error that the dialing side is to see."""
        self._outbox.close(error)
        self._inbox.close(closed_error(self._peer))

    def hang_up(self) -> None:
        """The dialing side has closed: what it sent is still read."""
        gone = ConnectionLostError(f"{self._peer} ended the exchange", reason="PEER_CLOSED")
        self._inbox.close(gone)
        self._outbox.close(gone, discard=True)

    async def push(self, batch: Batch) -> None:
        """Take frames; waits while the endpoint is not reading."""
        await self._inlet.accept(batch)

    async def pull(self, wait_s: float) -> Batch:
        """Queued frames, or none after `wait_s`; the last batch carries the error."""
        await self._outbox.wait(wait_s)
        try:
            frames: list[Frame] = self._outbox.take(MAX_BATCH, MAX_BATCH_BYTES)
        except OutriderError as error:
            return Batch(sequence=next(self._pulls), error=to_status(error))
        sequence = next(self._pulls)
        return Batch(sequence=sequence, frames=pack_frames(frames, self._bulk_bytes))


class _Session:
    """A session's pump, and how long nobody has asked for its events."""

    def __init__(self, mailbox: SessionMailbox, pump: asyncio.Task[None]) -> None:
        self.mailbox = mailbox
        self.pump = pump
        self.pulls = 0
        self.idle_s = 0.0


class EndpointHost:
    """Runs an endpoint in an actor's event loop and speaks for it."""

    def __init__(self, factory: EndpointFactory, config: RayConfig) -> None:
        self._factory = factory
        self._config = config
        self._stack = AsyncExitStack()
        self._keys = itertools.count()
        self._sessions: dict[int, _Session] = {}
        self._exchanges: dict[int, HostFrames] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint: Any = None

    async def start(self) -> Reply:
        """Make the endpoint; once it is ready, this process's id."""
        try:
            self._endpoint = await self._stack.enter_async_context(self._factory())
        except Exception as error:
            return Reply(error=to_status(error))
        self._spawn(self._reap(self._config.heartbeat))
        return Reply(value=os.getpid())

    async def stop(self) -> Reply:
        """End exchanges and sessions, then the endpoint."""
        for frames in self._exchanges.values():
            await frames.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.control_timeout_s)
        return await self._answer(self._stack.aclose)

    async def call(self, method: str, request: bytes) -> Reply:
        """A unary control call, by its name in the contract."""
        calls: dict[str, Callable[[], Awaitable[bytes]]] = {
            "VerifierService/GetInfo": lambda: self._verifier_info(),
            "VerifierService/SetPlan": lambda: self._set_plan(request),
            "VerifierService/CloseSession": lambda: self._close_session(request),
            "DrafterService/GetInfo": lambda: self._drafter_info(),
            "DrafterService/Attach": lambda: self._attach(request),
            "DrafterService/Detach": lambda: self._detach(request),
        }
        handler = calls.get(method)
        if handler is None:
            unknown = FailedPreconditionError(f"no method {method}", reason="UNIMPLEMENTED")
            return Reply(error=to_status(unknown))
        return await self._answer(handler)

    async def open_session(self, request: bytes) -> Reply:
        """Start a session; the key under which its events are pulled."""

        async def open_it() -> int:
            spec = decode_session_spec(request)
            mailbox, key = session_mailbox(), next(self._keys)
            pump = self._spawn(pump_events(self._endpoint, spec, mailbox))
            self._sessions[key] = _Session(mailbox, pump)
            return key

        return await self._answer(open_it)

    async def pull_session(self, key: int, wait_s: float, room: int) -> Reply:
        """(events as bytes, whether that was all); renews the session's lease."""

        async def pull() -> tuple[list[bytes], bool]:
            session = self._sessions.get(key)
            if session is None:
                raise NotFoundError("the session is over", reason="NO_SESSION")
            session.pulls += 1
            try:
                await self._wait_for_events(session, min(wait_s, _MAX_WAIT_S), room)
                items = session.mailbox.take(room, 0)
            finally:
                session.pulls -= 1
                session.idle_s = 0.0
            return [encode_session_message(item) for item in items if item is not None], (
                None in items
            )

        reply = await self._answer(pull)
        if reply.error is not None or reply.value[1]:
            await self.end_session(key)
        return reply

    async def end_session(self, key: int) -> Reply:
        """Close a session's stream, and by that the session; idempotent."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.pump.cancel()
            await asyncio.wait((session.pump,), timeout=self._config.control_timeout_s)
        return Reply()

    async def open_exchange(self, peer: str) -> Reply:
        """Start an exchange; the key under which its frames are pushed and pulled."""

        async def open_it() -> int:
            if not hasattr(self._endpoint, "exchange"):
                raise FailedPreconditionError("not a verifier", reason="UNIMPLEMENTED")
            key, frames = next(self._keys), HostFrames(peer, self._config)
            self._exchanges[key] = frames
            connection = verifier_end(frames, self._config.heartbeat)
            self._spawn(self._serve_exchange(key, frames, connection))
            return key

        return await self._answer(open_it)

    async def push_frames(self, key: int, batch: Batch) -> Reply:
        """Take a batch of frames of an exchange."""
        return await self._answer(lambda: self._exchange(key).push(batch))

    async def pull_frames(self, key: int, wait_s: float) -> Reply:
        """The next batch of frames of an exchange; empty if there are none in time."""
        return await self._answer(lambda: self._exchange(key).pull(min(wait_s, _MAX_WAIT_S)))

    async def end_exchange(self, key: int) -> Reply:
        """The dialing side has closed; idempotent."""
        frames = self._exchanges.get(key)
        if frames is not None:
            frames.hang_up()
        return Reply()

    def _exchange(self, key: int) -> HostFrames:
        frames = self._exchanges.get(key)
        if frames is None:
            raise ConnectionLostError("the exchange is over", reason="PEER_CLOSED")
        return frames

    async def _serve_exchange(
        self, key: int, frames: HostFrames, connection: VerifierConnection
    ) -> None:
        try:
            await self._endpoint.exchange(connection)
        except Exception as error:
            frames.end(typed(error))
        finally:
            await connection.close()
            # The dialing side still has to pull the end, unless it is the one that is gone.
            await asyncio.sleep(self._config.heartbeat.timeout_s)
            self._exchanges.pop(key, None)

    async def _reap(self, heartbeat: HeartbeatConfig) -> None:
        """Close sessions whose reader has not asked for the heartbeat time-out."""
        while True:
            await asyncio.sleep(heartbeat.tick_s)
            for key, session in list(self._sessions.items()):
                if not session.pulls:
                    session.idle_s += heartbeat.tick_s
                if session.idle_s > heartbeat.timeout_s:
                    await self.end_session(key)

    async def _wait_for_events(self, session: _Session, wait_s: float, room: int) -> None:
        if room > 0:
            await session.mailbox.wait(wait_s)
        else:
            await asyncio.sleep(wait_s)

    async def _answer(self, handler: Callable[[], Awaitable[Any]]) -> Reply:
        try:
            return Reply(value=await handler())
        except Exception as error:
            return Reply(error=to_status(error))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _verifier_info(self) -> bytes:
        return encode_verifier_info(await self._endpoint.info())

    async def _set_plan(self, request: bytes) -> bytes:
        await self._endpoint.set_plan(*decode_set_plan(request))
        return b""

    async def _close_session(self, request: bytes) -> bytes:
        await self._endpoint.close_session(decode_close_session(request))
        return b""

    async def _drafter_info(self) -> bytes:
        return encode_drafter_info(await self._endpoint.info())

    async def _attach(self, request: bytes) -> bytes:
        await self._endpoint.attach(decode_verifier_address(request))
        return b""

    async def _detach(self, request: bytes) -> bytes:
        await self._endpoint.detach(decode_verifier_address(request))
        return b""
