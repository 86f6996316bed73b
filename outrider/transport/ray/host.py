"""Actor that hosts an endpoint; every method returns after a bounded wait."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

from outrider.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    OutriderError,
)
from outrider.transport.error_codec import ErrorStatus, to_status, to_typed_error
from outrider.transport.framed_connection import FrameStream, serving_end, verifier_end
from outrider.transport.grpc import GrpcServer, verifier_services
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.transport.interface import ExchangeConnection
from outrider.transport.ray.frames import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    BatchReceiver,
    Frame,
    FrameBatch,
    closed_error,
    frame_mailbox,
    pack_frames,
)
from outrider.transport.ray.grpc_streams import grpc_config
from outrider.transport.ray.options import GRPC, RayConfig
from outrider.transport.ray.supervision import Supervision, SupervisionState
from outrider.wire.codec import (
    decode_attach,
    decode_close_session,
    decode_detach,
    decode_drain,
    decode_set_plan,
    encode_drafter_info,
    encode_verifier_info,
)

logger = logging.getLogger(__name__)

EndpointFactory = Callable[[], AbstractAsyncContextManager[Any]]
"""Function that creates an endpoint within its actor. Leaving the returned context stops the
endpoint."""

StreamEnd = Callable[[FrameStream, HeartbeatConfig], ExchangeConnection[Any, Any]]
"""Function that creates the endpoint's end of a connection from a stream of frames and the
heartbeat configuration."""

_MAX_WAIT_S = 10.0
_STOP_GRACE_S = 1.0
_ORPHAN_CHECK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of a call to an actor host, or its error."""

    value: Any = None
    error: ErrorStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLocation:
    """Process, node and GPUs of an actor."""

    pid: int
    """Process id of the actor."""
    node: str
    """Address of the actor's node."""
    node_id: str
    """Ray's id of the actor's node, as in `ray list nodes`."""
    gpus: tuple[str, ...]
    """GPUs that Ray assigned to the actor, by their numbers on the node. Within the actor they are
    numbered from 0."""


class HostFrames:
    """Actor side of a stream over Ray actor calls. The dialing side pushes frames into it and pulls
    frames from it."""

    def __init__(self, peer: str, config: RayConfig) -> None:
        self._peer = peer
        self._inbox = frame_mailbox()
        self._outbox = frame_mailbox()
        self._inlet = BatchReceiver(self._inbox, config.control_timeout_s)
        self._bulk_bytes = config.bulk_bytes
        self._pulls = itertools.count()

    @property
    def peer(self) -> str:
        """Name of the dialing side."""
        return self._peer

    async def send(self, frame: bytes) -> None:
        """Wait until the queue has space, then queue a frame for the next pull."""
        await self._outbox.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True. If the queue is full, queue none and return False."""
        return self._outbox.try_put(*frames)

    async def receive(self) -> Frame:
        """Wait for the next pushed frame and return it."""
        return await self._inbox.get()

    def receive_ready(self) -> list[Frame]:
        """Return the frames that have arrived, without waiting."""
        return self._inbox.take_all()

    async def close(self) -> None:
        """End the stream. The dialing side can still pull the queued frames; then its pulls report
        the end."""
        self.end_with_error(
            ConnectionLostError("the verifier ended the exchange", reason="PEER_CLOSED")
        )

    def end_with_error(self, error: OutriderError) -> None:
        """Close as `close` does, but send `error` to the dialing side."""
        self._outbox.close(error)
        self._inbox.close(closed_error(self._peer))

    def close_remote(self) -> None:
        """Record that the dialing side has closed the stream. The frames that it sent can still be
        read."""
        gone = ConnectionLostError(f"{self._peer} ended the exchange", reason="PEER_CLOSED")
        self._inbox.close(gone)
        self._outbox.close(gone, discard=True)

    async def push(self, batch: FrameBatch) -> None:
        """Accept a batch of frames. Waits while the queue of frames that the endpoint has not read
        is full."""
        await self._inlet.accept_batch(batch)

    async def pull(self, wait_s: float) -> FrameBatch:
        """Return a batch of queued frames. The batch is empty if no frame is queued within `wait_s`
        seconds. The last batch has the error with which the stream ended."""
        await self._outbox.wait(wait_s)
        try:
            frames: list[Frame] = self._outbox.take_some(MAX_BATCH, MAX_BATCH_BYTES)
        except OutriderError as error:
            return FrameBatch(sequence=next(self._pulls), error=to_status(error))
        sequence = next(self._pulls)
        return FrameBatch(sequence=sequence, frames=pack_frames(frames, self._bulk_bytes))


class EndpointHost:
    """Runs an endpoint in an actor's event loop and answers calls to it. Every method returns a
    `CallResult`."""

    def __init__(
        self, factory: EndpointFactory, config: RayConfig, supervision: Supervision
    ) -> None:
        self._factory = factory
        self._config = config
        self._stack = AsyncExitStack()
        self._keys = itertools.count()
        self._exchanges: dict[int, HostFrames] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint: Any = None
        self._server: GrpcServer | None = None
        self._where: ActorLocation | None = None
        self._supervision = SupervisionState(supervision, config.start_timeout_s, time.monotonic())
        self._orphan_check: asyncio.Task[None] | None = None

    async def start(self, supervisor: str) -> CallResult:
        """Create the endpoint, wait until it is ready, and return its `ActorLocation`."""
        self._orphan_check = asyncio.create_task(self._end_when_orphaned())

        async def start_it() -> ActorLocation:
            where = await self._start()
            self._supervision.renew(supervisor, time.monotonic())
            return where

        return await self._answer(start_it)

    async def claim(self, supervision: Supervision) -> CallResult:
        """Make another supervisor the actor's own. Return the `ActorLocation` of the endpoint, or
        None if it is not ready."""

        async def claim_it() -> ActorLocation | None:
            self._supervision.claim(supervision, time.monotonic())
            return self._where

        return await self._answer(claim_it)

    async def renew(self, supervisor: str) -> CallResult:
        """Record that the actor's supervisor is alive. Returns an error (SUPERVISOR_REPLACED) if
        another supervisor has claimed the actor."""

        async def renew_it() -> None:
            self._supervision.renew(supervisor, time.monotonic())

        return await self._answer(renew_it)

    async def stream_address(self) -> CallResult:
        """Return the HOST:PORT at which this actor accepts gRPC streams."""
        if self._server is None:
            refused = FailedPreconditionError("takes no gRPC streams", reason="UNIMPLEMENTED")
            return CallResult(error=to_status(refused))
        return CallResult(value=self._server.address)

    async def drain(self, timeout_s: float) -> CallResult:
        """Make a verifier hand over its sessions to other verifiers, within `timeout_s` seconds."""
        return await self._answer(lambda: self._endpoint.drain(timeout_s))

    async def stop(self, supervisor: str) -> CallResult:
        """End all exchanges and session streams, then the endpoint. Returns an error
        (SUPERVISOR_REPLACED) and ends nothing if another supervisor has claimed the actor."""
        renewed = await self.renew(supervisor)
        return renewed if renewed.error is not None else await self._stop()

    async def _stop(self) -> CallResult:
        for frames in self._exchanges.values():
            await frames.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._config.control_timeout_s)
        return await self._answer(self._stack.aclose)

    async def _end_when_orphaned(self) -> None:
        """End this actor, and release the resources that were reserved for it, once its supervisor
        has been silent for too long."""
        import ray

        while not self._supervision.is_orphaned(time.monotonic()):
            await asyncio.sleep(_ORPHAN_CHECK_S)
        logger.warning("actor ends because its supervisor is lost")
        await self._stop()
        # A detached placement group would outlive its actors.
        group = ray.util.get_current_placement_group()
        if group is not None:
            await asyncio.to_thread(ray.util.remove_placement_group, group)
        signal.raise_signal(signal.SIGTERM)

    async def call(self, method: str, request: bytes) -> CallResult:
        """Run a unary control call and return the encoded response. `method` is SERVICE/METHOD,
        such as `VerifierService/GetInfo`, and `request` is the encoded request."""
        calls: dict[str, Callable[[], Awaitable[bytes]]] = {
            "VerifierService/GetInfo": lambda: self._verifier_info(),
            "VerifierService/SetPlan": lambda: self._set_plan(request),
            "VerifierService/CloseSession": lambda: self._close_session(request),
            "DrafterService/GetInfo": lambda: self._drafter_info(),
            "DrafterService/Attach": lambda: self._attach(request),
            "DrafterService/Detach": lambda: self._detach(request),
            "DrafterService/Drain": lambda: self._drain(request),
        }
        handler = calls.get(method)
        if handler is None:
            unknown = FailedPreconditionError(f"no method {method}", reason="UNIMPLEMENTED")
            return CallResult(error=to_status(unknown))
        return await self._answer(handler)

    async def open_exchange(self, peer: str) -> CallResult:
        """Start an exchange and return its key, which `push_frames`, `pull_frames` and
        `end_exchange` need."""
        return await self._open(peer, "exchange", verifier_end, self._config.heartbeat)

    async def open_sessions(self, peer: str) -> CallResult:
        """Start a session stream and return its key, which `push_frames`, `pull_frames` and
        `end_exchange` need."""
        heartbeat = self._config.sessions_heartbeat
        return await self._open(peer, "serve_sessions", serving_end, heartbeat)

    async def _start(self) -> ActorLocation:
        import ray

        # Stop the server after the endpoint, which ends its streams with a message of its own.
        self._stack.push_async_callback(self._stop_listening)
        self._endpoint = await self._stack.enter_async_context(self._factory())
        node = ray.util.get_node_ip_address()
        # Drafters dial; they are not dialled.
        if self._config.exchange == GRPC and hasattr(self._endpoint, "exchange"):
            settings = grpc_config(self._config)
            server = GrpcServer(
                f"{self._config.listen_host or node}:0",
                verifier_services(self._endpoint, settings),
                config=settings,
            )
            await server.start()
            self._server = server
        context = ray.get_runtime_context()
        self._where = ActorLocation(
            pid=os.getpid(),
            node=node,
            node_id=context.get_node_id(),
            gpus=tuple(context.get_accelerator_ids().get("GPU", [])),
        )
        return self._where

    async def _stop_listening(self) -> None:
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)

    async def _open(
        self, peer: str, method: str, end: StreamEnd, heartbeat: HeartbeatConfig
    ) -> CallResult:
        async def open_it() -> int:
            serve = getattr(self._endpoint, method, None)
            if serve is None:
                raise FailedPreconditionError("not a verifier", reason="UNIMPLEMENTED")
            key, frames = next(self._keys), HostFrames(peer, self._config)
            self._exchanges[key] = frames
            connection = end(frames, heartbeat)
            self._spawn(self._serve(serve, key, frames, connection))
            return key

        return await self._answer(open_it)

    async def push_frames(self, key: int, batch: FrameBatch) -> CallResult:
        """Accept a batch of frames for the exchange or session stream with this key."""
        return await self._answer(lambda: self._exchange(key).push(batch))

    async def pull_frames(self, key: int, wait_s: float) -> CallResult:
        """Return the next batch of frames of the exchange or session stream with this key. The
        batch is empty if no frame is queued within `wait_s` seconds."""
        return await self._answer(lambda: self._exchange(key).pull(min(wait_s, _MAX_WAIT_S)))

    async def end_exchange(self, key: int) -> CallResult:
        """Record that the dialing side has closed the exchange or session stream with this key.
        Idempotent."""
        frames = self._exchanges.get(key)
        if frames is not None:
            frames.close_remote()
        return CallResult()

    def _exchange(self, key: int) -> HostFrames:
        frames = self._exchanges.get(key)
        if frames is None:
            raise ConnectionLostError("the exchange is over", reason="PEER_CLOSED")
        return frames

    async def _serve(
        self,
        serve: Callable[[Any], Awaitable[None]],
        key: int,
        frames: HostFrames,
        connection: ExchangeConnection[Any, Any],
    ) -> None:
        try:
            await serve(connection)
        except Exception as error:
            frames.end_with_error(to_typed_error(error))
        finally:
            await connection.close()
            # The dialing side must still pull the end, unless it is gone itself.
            await asyncio.sleep(self._config.heartbeat.timeout_s)
            self._exchanges.pop(key, None)

    async def _answer(self, handler: Callable[[], Awaitable[Any]]) -> CallResult:
        try:
            return CallResult(value=await handler())
        except Exception as error:
            return CallResult(error=to_status(error))

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
        await self._endpoint.attach(decode_attach(request))
        return b""

    async def _detach(self, request: bytes) -> bytes:
        await self._endpoint.detach(decode_detach(request))
        return b""

    async def _drain(self, request: bytes) -> bytes:
        await self._endpoint.set_draining(decode_drain(request))
        return b""
