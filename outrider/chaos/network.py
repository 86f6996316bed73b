"""Simulated in-process network whose links can be delayed, blocked, cut or corrupted.

Messages cross as frames, through the wire codec and with heartbeats, as between real processes. The
"processes" are objects of one Python process. After one is killed, nothing that it sends arrives,
even if some of its tasks still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from outrider.chaos.frame_faults import FrameFaults
from outrider.errors import (
    AlreadyExistsError,
    ConnectionLostError,
    DeadlineExceededError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.bounded_queue import BoundedQueue
from outrider.transport.error_codec import to_typed_error
from outrider.transport.framed_connection import drafter_end, router_end, serving_end, verifier_end
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.transport.interface import DrafterConnection, RouterConnection
from outrider.transport.session_stream import SessionIteratorMixin

CONTROL_S = 0.5
"""Maximum duration of a control call to another process, in seconds."""


def _lost(peer: str) -> ConnectionLostError:
    return ConnectionLostError(f"lost {peer}", reason="PEER_LOST")


class NetworkDirection:
    """State of one direction of the link between two processes: its delay, its blocks and its
    faults."""

    def __init__(self) -> None:
        self._blocks = 0
        self._changed = asyncio.Event()
        self.delay_s = 0.0
        self.mangling: FrameFaults | None = None
        """Faults that are applied to the frames of exchanges, or None."""

    def block(self) -> None:
        """Block this direction. It stays blocked until `unblock` has been called as often as
        `block`."""
        self._blocks += 1

    def unblock(self) -> None:
        """Undo one call of `block`. After the last one is undone, waiting data passes."""
        self._blocks -= 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_transit(self) -> None:
        """Wait for the delay of this direction, then until it is not blocked."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        while self._blocks:
            await self._changed.wait()


class _Pipe:
    """One direction of a connection."""

    def __init__(self, way: NetworkDirection, *, mangles: bool) -> None:
        self._way = way
        self._mangles = mangles
        self.sent: BoundedQueue[bytes | memoryview] = BoundedQueue(size_of=len)
        self.arrived: BoundedQueue[bytes | memoryview] = BoundedQueue(size_of=len)

    async def run(self) -> None:
        """Carry frames until the sender has ended and all its frames have arrived."""
        try:
            while True:
                frame = await self.sent.get()
                await self._way.wait_transit()
                mangling = self._way.mangling if self._mangles else None
                for one in [frame] if mangling is None else mangling.frames(bytes(frame)):
                    await self.arrived.put(one)
        except OutriderError as end:
            await self._way.wait_transit()
            self.arrived.close(end)

    def cut(self, peer: str) -> None:
        """End the direction; frames in transit are lost."""
        self.sent.close(_lost(peer), discard=True)


class _NetworkEnd:
    """One end of a connection that carries frames."""

    def __init__(self, peer: str, out: _Pipe, into: _Pipe) -> None:
        self._peer, self._out, self._into = peer, out, into

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, frame: bytes) -> None:
        await self._out.sent.put(frame)

    def try_send(self, *frames: bytes) -> bool:
        return self._out.sent.try_put(*frames)

    async def receive(self) -> bytes | memoryview:
        return await self._into.arrived.get()

    def receive_ready(self) -> list[bytes | memoryview]:
        return self._into.arrived.take_all()

    async def close(self) -> None:
        self.end(ConnectionLostError(f"{self._peer} ended the exchange", reason="PEER_CLOSED"))
        closed = ConnectionLostError(f"connection to {self._peer} is closed", reason="CLOSED")
        self._into.sent.close(_lost(self._peer), discard=True)
        self._into.arrived.close(closed, discard=True)

    def end(self, error: OutriderError) -> None:
        """End the sending direction. The peer can still read what was sent; after that it gets this
        error."""
        self._out.sent.close(error)


class _Connection:
    """Both directions between two processes."""

    def __init__(self, there: _Pipe, back: _Pipe) -> None:
        self.there, self.back = there, back

    def cut(self, caller: str, host: str) -> None:
        self.there.cut(caller)
        self.back.cut(host)


class ChaosNetwork:
    """Simulated network: processes by name, their endpoints, and the links between them."""

    def __init__(self, *, heartbeat: HeartbeatConfig, control_s: float = CONTROL_S) -> None:
        self.control_s = control_s
        self._heartbeat = heartbeat
        self._endpoints: dict[str, Any] = {}
        self._callers: dict[str, ChaosDialer] = {}
        self._ways: dict[tuple[str, str], NetworkDirection] = {}
        self._connections: dict[_Connection, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve_process(self, name: str, endpoint: object) -> None:
        """Make a process reachable under a name. Its methods are those of `endpoint`."""
        if name in self._endpoints:
            raise AlreadyExistsError(f"{name} is taken", reason="ADDRESS_IN_USE")
        self._endpoints[name] = endpoint

    def dialer(self, caller: str) -> ChaosDialer:
        """Return the dialer with which the process `caller` connects to other processes.

        Earlier dialers of the process stop working.
        """
        earlier = self._callers.get(caller)
        if earlier is not None:
            earlier.alive = False
        dialer = self._callers[caller] = ChaosDialer(self, caller)
        return dialer

    def direction(self, source: str, target: str) -> NetworkDirection:
        """Return the state of the link from process `source` to process `target`."""
        return self._ways.setdefault((source, target), NetworkDirection())

    def directions_between(self, name: str, others: list[str]) -> list[NetworkDirection]:
        """Return the states of the links between the process `name` and each of the others, in both
        directions."""
        pairs = [pair for other in others for pair in ((name, other), (other, name))]
        return [self.direction(*pair) for pair in pairs]

    def kill(self, name: str) -> None:
        """End a process: its connections end, and whatever it still sends reaches no other
        process."""
        self._endpoints.pop(name, None)
        dialer = self._callers.get(name)
        if dialer is not None:
            dialer.alive = False
        for connection, pair in list(self._connections.items()):
            if name in pair:
                connection.cut(*pair)

    def cut_connections(self, one: str, other: str) -> None:
        """End every connection between two processes; frames in transit are lost."""
        for connection, pair in list(self._connections.items()):
            if set(pair) == {one, other}:
                connection.cut(*pair)

    async def close(self) -> None:
        """End all tasks of the network."""
        for name in list(self._endpoints):
            self.kill(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def endpoint(self, name: str) -> Any:
        """Return the endpoint of the process with this name. Raises UnavailableError if there is
        none."""
        if name not in self._endpoints:
            raise UnavailableError(f"nothing serves {name}", reason="UNREACHABLE")
        return self._endpoints[name]

    def connect(
        self, caller: str, host: str, serve: str, *, mangles: bool
    ) -> tuple[_NetworkEnd, _NetworkEnd]:
        """Open a connection and return both ends, the caller's first.

        `serve` names the method of the host's endpoint that receives the host's end. `mangles` says
        whether frame faults apply to the connection.
        """
        there = _Pipe(self.direction(caller, host), mangles=mangles)
        back = _Pipe(self.direction(host, caller), mangles=mangles)
        connection = _Connection(there, back)
        self._connections[connection] = (caller, host)
        near, far = _NetworkEnd(host, there, back), _NetworkEnd(caller, back, there)
        carrying = [self._start(pipe.run()) for pipe in (there, back)]
        for task in carrying:
            task.add_done_callback(partial(self._forget, connection, carrying))
        self._start(self._serve(getattr(self.endpoint(host), serve), serve, far))
        return near, far

    def exchange_end(self, frames: _NetworkEnd) -> DrafterConnection:
        """Return the drafter's connection over its end of an exchange."""
        return drafter_end(frames, self._heartbeat)

    def router_end(self, frames: _NetworkEnd) -> RouterConnection:
        """Return the router's connection over its end of a stream of sessions."""
        return router_end(frames, self._heartbeat)

    async def _serve(
        self, serve: Callable[[Any], Awaitable[None]], kind: str, far: _NetworkEnd
    ) -> None:
        make = verifier_end if kind == "exchange" else serving_end
        connection: Any = make(far, self._heartbeat)
        error: OutriderError = _lost("the verifier")
        try:
            await serve(connection)
            error = ConnectionLostError("the verifier ended the stream", reason="PEER_CLOSED")
        except Exception as failure:
            error = to_typed_error(failure)
        finally:
            far.end(error)
            await connection.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="chaos-network")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _forget(
        self, connection: _Connection, carrying: list[asyncio.Task[None]], _: object
    ) -> None:
        if all(task.done() for task in carrying):
            self._connections.pop(connection, None)


class ChaosDialer:
    """Dialer with which one process of a `ChaosNetwork` connects to other processes."""

    def __init__(self, network: ChaosNetwork, caller: str) -> None:
        self.alive = True
        """Whether the process of this dialer is alive."""
        self._network = network
        self._caller = caller

    async def exchange(self, verifier_address: str) -> DrafterConnection:
        """Open an exchange connection to a verifier. Raises UnavailableError if it cannot be
        reached."""
        near = await self._connect(verifier_address, "exchange", mangles=True)
        return self._network.exchange_end(near)

    async def sessions(self, verifier_address: str) -> RouterConnection:
        """Open a stream of sessions with a verifier. Raises UnavailableError if it cannot be
        reached."""
        near = await self._connect(verifier_address, "serve_sessions", mangles=False)
        return self._network.router_end(near)

    async def verifier(self, address: str) -> Any:
        """Return a control client of the verifier at `address`."""
        return _Control(self, address)

    async def drafter(self, address: str) -> Any:
        """Return a control client of the drafter at `address`."""
        return _Control(self, address)

    async def close_channel(self, address: str) -> None:
        """Do nothing: there are no channels, and callers close their connections themselves."""

    async def close(self) -> None:
        """Do nothing: callers close their connections themselves."""

    async def call(self, host: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the endpoint of another process and return its result.

        Raises UnavailableError, DeadlineExceededError or the method's own error.
        """
        network, caller = self._network, self._caller
        try:
            async with asyncio.timeout(self._network.control_s):
                endpoint = self._endpoint(host)
                await network.direction(caller, host).wait_transit()
                result = await getattr(self._endpoint(host), method)(*args, **kwargs)
                await network.direction(host, caller).wait_transit()
                if self._endpoint(host) is not endpoint:
                    raise _lost(host)
                return result
        except TimeoutError:
            raise DeadlineExceededError(f"{host} did not answer", reason="TRANSPORT") from None
        except Exception as error:
            raise to_typed_error(error) from error

    def _endpoint(self, host: str) -> Any:
        if not self.alive:
            raise UnavailableError("this process is gone", reason="UNREACHABLE")
        return self._network.endpoint(host)

    async def _connect(self, host: str, serve: str, *, mangles: bool) -> _NetworkEnd:
        network, caller = self._network, self._caller
        try:
            async with asyncio.timeout(self._network.control_s):
                self._endpoint(host)
                await network.direction(caller, host).wait_transit()
                await network.direction(host, caller).wait_transit()
                self._endpoint(host)
        except TimeoutError:
            raise UnavailableError(f"{host} does not answer", reason="UNREACHABLE") from None
        near, _far = network.connect(caller, host, serve, mangles=mangles)
        return near


class _Control(SessionIteratorMixin):
    """Control client of a process. Each method of the process's endpoint can be called on it."""

    def __init__(self, dialer: ChaosDialer, address: str) -> None:
        self._dialer = dialer
        self._address = address

    async def sessions(self) -> RouterConnection:
        return await self._dialer.sessions(self._address)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._dialer.call, self._address, method)
