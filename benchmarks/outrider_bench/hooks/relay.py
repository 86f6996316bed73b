"""Process that acts as a slow link: `python -m outrider_bench.hooks.relay DELAY_MS`.

It stands between a drafter and its verifiers and delays all data in each direction. It is a
separate process, so that the drafting thread neither waits for it nor shares a Python interpreter
with it. It reads commands from stdin, one per line, and answers each with a line on stdout, "error
WHY" if it cannot execute the command. It ends when its input ends.

dial HOST:PORT   opens a port and relays its TCP connections to HOST:PORT; answers HOST:PORT of
                 the opened port
shm NAME TOKEN   joins the shared-memory channel of this offer, makes another offer, and relays
                 frames between the two channels; answers NAME TOKEN of its own offer
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from outrider.errors import ConnectionLostError, OutriderError, UnavailableError
from outrider.transport.shm import ShmChannel, ShmListener, join_channel
from outrider.wire.messages import ShmOffer

SPIN_S: Final = 0.0002
"""Seconds before a frame is due in which the relay polls instead of sleeping, because a sleep may
end up to 100 us late."""
_MAX_HELD: Final = 256 << 20
"""Maximum bytes in transit in one direction. Above it the relay does not read from the sender."""
_CONNECT_S: Final = 5.0
_READ_BYTES: Final = 1 << 18
_MAX_READS: Final = 16
"""Maximum number of consecutive reads from one end, so that other ends do not wait."""


class RelayEndpoint(Protocol):
    """One of the two ends of a link, such as an `ShmChannel`. No method blocks."""

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when data arrives."""
        ...

    @property
    def num_unsent(self) -> int:
        """Number of bytes or frames that are not sent yet. `flush` tries to send them."""
        ...

    def send(self, *frames: bytes) -> None:
        """Send frames in order. Raises ConnectionLostError."""
        ...

    def flush(self) -> None:
        """Send as many unsent bytes as possible now. Raises ConnectionLostError."""
        ...

    def receive(self) -> list[bytes]:
        """Return the received frames. Raises ConnectionLostError once the peer has closed the
        connection."""
        ...

    def close(self) -> None:
        """Close the endpoint; idempotent."""
        ...


class TcpEndpoint:
    """TCP connection as an end of a link."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when data arrives."""
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Number of byte strings that are not sent yet."""
        return len(self._unsent)

    def send(self, *frames: bytes) -> None:
        """Send bytes in order. Raises ConnectionLostError."""
        self._unsent.extend(map(memoryview, frames))
        self.flush()

    def flush(self) -> None:
        """Send as many unsent bytes as possible now. Raises ConnectionLostError."""
        while self._unsent:
            piece = self._unsent[0]
            try:
                sent = self._socket.send(piece)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLostError(str(error), reason="PEER_LOST") from None
            if sent < len(piece):
                self._unsent[0] = piece[sent:]
            else:
                self._unsent.popleft()

    def receive(self) -> list[bytes]:
        """Return the received bytes in pieces. Raises ConnectionLostError once the peer has closed
        the connection."""
        pieces: list[bytes] = []
        while len(pieces) < _MAX_READS:
            try:
                piece = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise ConnectionLostError(str(error), reason="PEER_LOST") from None
            if not piece:
                if pieces:
                    break
                raise ConnectionLostError("the peer closed it", reason="PEER_CLOSED")
            pieces.append(piece)
        return pieces

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()


class RelayDirection:
    """One direction of a link. It delays the frames from `source` and sends them to `sink` in
    order."""

    def __init__(self, source: RelayEndpoint, sink: RelayEndpoint, delay_s: float) -> None:
        self.source, self.sink = source, sink
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._ended_at: float | None = None

    @property
    def reads(self) -> bool:
        """Whether frames may be read from the source: it has not ended, and few enough bytes are in
        transit."""
        return self._ended_at is None and self._size < _MAX_HELD

    @property
    def due(self) -> float | None:
        """Time at which the next frame or, after the last frame, the end of the source must be
        passed on; None if nothing waits."""
        return self._held[0][0] if self._held else self._ended_at

    def over(self, now: float) -> bool:
        """Return whether the source has ended, its delay has passed, and all its frames are
        sent."""
        ended = self._ended_at is not None and self._ended_at <= now
        return ended and not self._held and not self.sink.num_unsent

    def take_in(self, now: float) -> None:
        """Read the available frames from the source and set the time at which each is due."""
        try:
            frames = self.source.receive()
        except OutriderError:
            self._ended_at = now + self._delay_s
            return
        self._held.extend((now + self._delay_s, frame) for frame in frames)
        self._size += sum(map(len, frames))

    def deliver_due(self, now: float) -> None:
        """Send the frames that are due at time `now`. Raises ConnectionLostError if the receiving
        end is gone."""
        while self._held and self._held[0][0] <= now:
            frame = self._held.popleft()[1]
            self._size -= len(frame)
            self.sink.send(frame)
        if self.sink.num_unsent:
            self.sink.flush()


class Relay:
    """Relays links between two ends each, and accepts connections for new links. One thread runs it
    by calling `step`."""

    def __init__(self, delay_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._delay_s = delay_s
        self._clock = clock
        self._links: list[tuple[RelayDirection, RelayDirection]] = []
        self._listeners: dict[socket.socket, tuple[str, int]] = {}

    @property
    def links(self) -> int:
        """Number of links that are open."""
        return len(self._links)

    def join(self, one: RelayEndpoint, other: RelayEndpoint) -> None:
        """Add a link that relays frames between two ends until one of them ends."""
        delay_s = self._delay_s
        self._links.append(
            (RelayDirection(one, other, delay_s), RelayDirection(other, one, delay_s))
        )

    def listen(self, host: str, port: int) -> str:
        """Listen on a free port and relay its connections to HOST:PORT. Return the address of the
        port. Raises OSError."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self._listeners[listener] = (host, port)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def step(self, *others: int) -> bool:
        """Wait until a frame is due or data arrives, and handle it. The wait also ends when one of
        the file descriptors `others` can be read; return whether this is so."""
        readers: list[int] = [*others, *(listener.fileno() for listener in self._listeners)]
        writers: list[int] = []
        for direction in self._directions():
            if direction.reads:
                readers.append(direction.source.fileno())
            if direction.sink.num_unsent:
                writers.append(direction.sink.fileno())
        ready = set(select.select(readers, writers, (), self._wait_s())[0])
        for link in list(self._links):
            if not self._carry(link, ready):
                self._links.remove(link)
                link[0].source.close()
                link[0].sink.close()
        for listener in self._listeners:
            if listener.fileno() in ready:
                self._accept(listener)
        return not ready.isdisjoint(others)

    def close(self) -> None:
        """Close all links and listeners, and drop the frames in transit."""
        for one, _ in self._links:
            one.source.close()
            one.sink.close()
        self._links.clear()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _directions(self) -> list[RelayDirection]:
        return [direction for link in self._links for direction in link]

    def _wait_s(self) -> float | None:
        """Return how long to sleep, in seconds; None to sleep until data arrives."""
        dues = [
            due for d in self._directions() if (due := d.due) is not None and not d.sink.num_unsent
        ]
        if not dues:
            return None
        return max(0.0, min(dues) - self._clock() - SPIN_S)

    def _carry(self, link: tuple[RelayDirection, RelayDirection], ready: set[int]) -> bool:
        """Move the frames of a link; return whether the link is still open."""
        for direction in link:
            if direction.reads and direction.source.fileno() in ready:
                direction.take_in(self._clock())
        try:
            for direction in link:
                direction.deliver_due(self._clock())
        except OutriderError:
            return False
        return not any(direction.over(self._clock()) for direction in link)

    def _accept(self, listener: socket.socket) -> None:
        try:
            caller, _ = listener.accept()
        except OSError:
            return
        try:
            called = socket.create_connection(self._listeners[listener], timeout=_CONNECT_S)
        except OSError:
            caller.close()
            return
        self.join(TcpEndpoint(caller), TcpEndpoint(called))


def handle_command(relay: Relay, command: str, answer: Callable[[str], None]) -> None:
    """Execute a command and send its answer.

    The answer to `shm` is sent before the command is complete, because the sender must first join
    the channel that the answer offers.
    """
    try:
        match command.split():
            case ["dial", address]:
                host, _, port = address.rpartition(":")
                answer(relay.listen(host.strip("[]"), int(port)))
            case ["shm", name, token]:
                far = join_channel(ShmOffer(name=name, token=bytes.fromhex(token)))
                try:
                    near = asyncio.run(_shm_channel_of_asker(answer))
                except BaseException:
                    far.close()
                    raise
                relay.join(near, far)
            case _:
                answer("error no such command: dial HOST:PORT, or shm NAME TOKEN")
    except (OutriderError, OSError, ValueError, OverflowError) as error:
        answer(f"error {error}")


async def _shm_channel_of_asker(answer: Callable[[str], None]) -> ShmChannel:
    listener = ShmListener.open()
    if listener is None:
        raise UnavailableError("this system has no channels of shared memory", reason="NO_SHM")
    try:
        offer = listener.make_offer()
        answer(f"{offer.name} {offer.token.hex()}")
        return await listener.wait_joined(offer)
    finally:
        listener.close()


def main(delay_ms: float) -> None:
    """Relay until stdin ends."""
    relay, said = Relay(delay_ms / 1000.0), b""

    def answer(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        while True:
            if not relay.step(0):
                continue
            more = os.read(0, 4096)
            if not more:
                break
            *commands, said = (said + more).split(b"\n")
            for command in commands:
                handle_command(relay, command.decode(), answer)
    relay.close()


if __name__ == "__main__":
    main(float(sys.argv[1]))
