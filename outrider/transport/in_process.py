"""In-process transport: endpoints and dialers that share one event loop.

Used by tests and by fused placement. With `encoded`, exchange messages are encoded and decoded by
the wire codec (for tests). Without it, objects are passed by reference (for fused placement).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from outrider.errors import AlreadyExistsError, ConnectionLostError, OutriderError, UnavailableError
from outrider.ids import SessionId
from outrider.spec.plan import SpeculationPlan
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.error_codec import to_typed_error
from outrider.transport.framed_connection import drafter_end, router_end, serving_end, verifier_end
from outrider.transport.heartbeat import HeartbeatConfig, with_heartbeat
from outrider.transport.interface import (
    DrafterConnection,
    DrafterEndpoint,
    ExchangeConnection,
    RouterConnection,
    VerifierEndpoint,
)
from outrider.transport.session_stream import SessionIteratorMixin
from outrider.wire.messages import (
    DrafterInfo,
    DrafterMessage,
    SessionsMessage,
    SessionsRequest,
    VerifierInfo,
    VerifierMessage,
)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")
EndpointT = TypeVar("EndpointT")

_ENDPOINT_GRACE_S = 2.0
"""Time that an endpoint gets to notice that its exchange is gone, in seconds."""


def _lost(peer: str) -> ConnectionLostError:
    return ConnectionLostError(f"lost {peer}", reason="PEER_LOST")


class _InProcessEnd(Generic[SendT, ReceiveT]):
    """One end of a pipe of two bounded queues."""

    def __init__(
        self, peer: str, outbox: BoundedQueue[SendT], inbox: BoundedQueue[ReceiveT]
    ) -> None:
        self._peer = peer
        self._outbox, self._inbox = outbox, inbox

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: SendT) -> None:
        await self._outbox.put(message)

    def try_send(self, *messages: SendT) -> bool:
        return self._outbox.try_put(*messages)

    async def receive(self) -> ReceiveT:
        return await self._inbox.get()

    def receive_ready(self) -> list[ReceiveT]:
        return self._inbox.take_all()

    async def close(self) -> None:
        closed = ConnectionLostError(f"connection to {self._peer} is closed", reason="CLOSED")
        self._outbox.close(ConnectionLostError("the peer ended the exchange", reason="PEER_CLOSED"))
        self._inbox.close(closed, discard=True)

    def end(self, error: OutriderError) -> None:
        """End both directions. The peer receives the messages sent so far, then `error`."""
        self._outbox.close(error)
        self._inbox.close(_lost(self._peer))


class _InProcessHost:
    """Endpoints of one address, with their tasks and connections."""

    def __init__(self) -> None:
        self.verifier: VerifierEndpoint | None = None
        self.drafter: DrafterEndpoint | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.ends: set[_InProcessEnd[Any, Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def die(self, address: str) -> None:
        """Break all connections to this address, then cancel the tasks that do not end in time."""
        for end in list(self.ends):
            end.end(_lost(address))
        if self.tasks:
            _done, pending = await asyncio.wait(self.tasks, timeout=_ENDPOINT_GRACE_S)
            for task in pending:
                task.cancel()


class InprocNetwork:
    """The endpoints of one process, which dialers find by address."""

    def __init__(self, *, heartbeat: HeartbeatConfig | None = None, encoded: bool = True) -> None:
        self.heartbeat = heartbeat or HeartbeatConfig()
        self._encoded = encoded
        self._processes: dict[str, _InProcessHost] = {}

    def serve_verifier(self, address: str, endpoint: VerifierEndpoint) -> None:
        """Make a verifier reachable at an address."""
        process = self._processes.setdefault(address, _InProcessHost())
        if process.verifier is not None:
            raise AlreadyExistsError(f"{address} is taken", reason="ADDRESS_IN_USE")
        process.verifier = endpoint

    def serve_drafter(self, address: str, endpoint: DrafterEndpoint) -> None:
        """Make a drafter reachable at an address."""
        process = self._processes.setdefault(address, _InProcessHost())
        if process.drafter is not None:
            raise AlreadyExistsError(f"{address} is taken", reason="ADDRESS_IN_USE")
        process.drafter = endpoint

    async def remove(self, address: str) -> None:
        """Make an address unreachable and end its connections with an error, as if its process had
        died."""
        process = self._processes.pop(address, None)
        if process is not None:
            await process.die(address)

    def dialer(self) -> InprocDialer:
        """Return a dialer to the endpoints of this network."""
        return InprocDialer(self)

    def process(self, address: str) -> _InProcessHost:
        """Return the endpoints, tasks and connections of an address. Raises UnavailableError if
        nothing serves it."""
        process = self._processes.get(address)
        if process is None:
            raise UnavailableError(f"nothing serves {address}", reason="UNREACHABLE")
        return process

    def verifier(self, address: str) -> VerifierEndpoint:
        """Return the verifier at an address. Raises UnavailableError if there is none."""
        return _found(self.process(address).verifier, "verifier", address)

    def drafter(self, address: str) -> DrafterEndpoint:
        """Return the drafter at an address. Raises UnavailableError if there is none."""
        return _found(self.process(address).drafter, "drafter", address)

    def connect(self, address: str) -> DrafterConnection:
        """Start an exchange with the verifier at an address, and return the drafter's end."""
        endpoint, process = self.verifier(address), self.process(address)
        far: _InProcessEnd[Any, Any]
        if self._encoded:
            far, near_end = make_byte_pipe(address, "inproc:drafter")
            connection = verifier_end(far, self.heartbeat)
            near = drafter_end(near_end, self.heartbeat)
        else:
            requests: BoundedQueue[DrafterMessage] = BoundedQueue()
            responses: BoundedQueue[VerifierMessage] = BoundedQueue()
            far = _InProcessEnd("inproc:drafter", responses, requests)
            connection = with_heartbeat(far, self.heartbeat)
            near = with_heartbeat(_InProcessEnd(address, requests, responses), self.heartbeat)
        process.ends.add(far)
        process.start(_serve(endpoint.exchange, connection, far, process))
        return near

    def connect_sessions(self, address: str) -> RouterConnection:
        """Start a session stream with the verifier at an address, and return the router's end."""
        endpoint, process = self.verifier(address), self.process(address)
        far: _InProcessEnd[Any, Any]
        if self._encoded:
            far, near_end = make_byte_pipe(address, "inproc:router")
            connection = serving_end(far, self.heartbeat)
            near = router_end(near_end, self.heartbeat)
        else:
            far, plain = _session_pipe(address)
            connection = with_heartbeat(far, self.heartbeat)
            near = with_heartbeat(plain, self.heartbeat)
        process.ends.add(far)
        process.start(_serve(endpoint.serve_sessions, connection, far, process))
        return near


def open_local_sessions(endpoint: VerifierEndpoint) -> RouterConnection:
    """Start a session stream with an endpoint of this process, without codec and heartbeats, and
    return the router's end."""
    process = _InProcessHost()
    far, near = _session_pipe("inproc:verifier")
    serving = process.start(_serve(endpoint.serve_sessions, far, far, process))
    _LOCAL.add(serving)
    serving.add_done_callback(_LOCAL.discard)
    return near


_LOCAL: set[asyncio.Task[None]] = set()
"""Tasks in which endpoints serve local streams; a task ends with its stream."""


def make_byte_pipe(
    address: str, peer: str
) -> tuple[_InProcessEnd[Any, Any], _InProcessEnd[bytes | memoryview, bytes | memoryview]]:
    """Return both ends of a connection that transports frames: first the endpoint's end, whose peer
    is `peer`, then the caller's end, whose peer is `address`."""
    up: BoundedQueue[bytes | memoryview] = BoundedQueue(size_of=len)
    down: BoundedQueue[bytes | memoryview] = BoundedQueue(size_of=len)
    return _InProcessEnd(peer, down, up), _InProcessEnd(address, up, down)


def _session_pipe(
    address: str,
) -> tuple[_InProcessEnd[Any, Any], _InProcessEnd[SessionsRequest, SessionsMessage]]:
    up: BoundedQueue[SessionsRequest] = BoundedQueue()
    down: BoundedQueue[SessionsMessage] = BoundedQueue()
    return _InProcessEnd("inproc:router", down, up), _InProcessEnd(address, up, down)


def _found(endpoint: EndpointT | None, kind: str, address: str) -> EndpointT:
    if endpoint is None:
        raise UnavailableError(f"no {kind} serves {address}", reason="UNREACHABLE")
    return endpoint


@contextmanager
def _typed_errors() -> Generator[None]:
    """Convert errors to those that a caller in another process would receive."""
    try:
        yield
    except Exception as error:
        raise to_typed_error(error) from error


async def _serve(
    serve: Callable[[Any], Awaitable[None]],
    connection: ExchangeConnection[Any, Any],
    far: _InProcessEnd[Any, Any],
    process: _InProcessHost,
) -> None:
    error: OutriderError = _lost("the verifier")
    try:
        await serve(connection)
        error = ConnectionLostError("the verifier ended the stream", reason="PEER_CLOSED")
    except Exception as failure:
        error = to_typed_error(failure)
    finally:
        far.end(error)
        process.ends.discard(far)
        await connection.close()


class InprocVerifier(SessionIteratorMixin):
    """Control client of a verifier in this process."""

    def __init__(self, network: InprocNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def info(self) -> VerifierInfo:
        """Return identity, capacity and load of the verifier."""
        endpoint = self._network.verifier(self._address)
        with _typed_errors():
            return await endpoint.info()

    async def sessions(self) -> RouterConnection:
        """Open a session stream to the verifier. Raises UnavailableError."""
        return self._network.connect_sessions(self._address)

    async def set_plan(self, session_id: SessionId, plan: SpeculationPlan) -> None:
        """Change a session's plan."""
        endpoint = self._network.verifier(self._address)
        with _typed_errors():
            await endpoint.set_plan(session_id, plan)

    async def close_session(self, session_id: SessionId) -> None:
        """End a session."""
        endpoint = self._network.verifier(self._address)
        with _typed_errors():
            await endpoint.close_session(session_id)


class InprocDrafter:
    """Control client of a drafter in this process."""

    def __init__(self, network: InprocNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def info(self) -> DrafterInfo:
        """Return identity and load of the drafter."""
        endpoint = self._network.drafter(self._address)
        with _typed_errors():
            return await endpoint.info()

    async def attach(self, verifier_address: str) -> None:
        """Connect the drafter to a verifier."""
        endpoint = self._network.drafter(self._address)
        with _typed_errors():
            await endpoint.attach(verifier_address)

    async def detach(self, verifier_address: str) -> None:
        """Disconnect the drafter from a verifier."""
        endpoint = self._network.drafter(self._address)
        with _typed_errors():
            await endpoint.detach(verifier_address)

    async def set_draining(self, draining: bool) -> None:
        """Set whether the drafter announces that it will stop."""
        endpoint = self._network.drafter(self._address)
        with _typed_errors():
            await endpoint.set_draining(draining)


class InprocDialer:
    """Connects to the endpoints of its network."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError."""
        return self._network.connect(verifier_address)

    async def verifier(self, address: str) -> InprocVerifier:
        """Return a control client of the verifier at `address`."""
        return InprocVerifier(self._network, address)

    async def drafter(self, address: str) -> InprocDrafter:
        """Return a control client of the drafter at `address`."""
        return InprocDrafter(self._network, address)

    async def close_channel(self, address: str) -> None:
        """Do nothing, because there are no channels."""

    async def close(self) -> None:
        """Do nothing, because there are no channels."""
