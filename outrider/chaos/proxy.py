"""TCP proxy between two processes that injects link faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.chaos.frame_faults import flip_bits

CHUNK_BYTES = 16384


@dataclass(slots=True)
class _Direction:
    """State of one direction of a connection."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    corrupt: float = 0.0
    """Share of the chunks in which bits are changed."""
    truncate: bool = False
    """Whether to cut the next chunk short and then end its connection."""

    def __post_init__(self) -> None:
        self.open.set()


class TcpProxy:
    """Proxy that forwards TCP connections to an upstream address, which may change.

    `address` is the address on which the proxy listens.
    """

    def __init__(self, upstream: Callable[[], str], *, seed: int = 0) -> None:
        """Create a proxy that does not listen yet.

        `upstream` is called for each connection and returns the HOST:PORT to which it is forwarded.
        """
        self.address = ""
        self._upstream = upstream
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._there, self._back = _Direction(), _Direction()
        self._shut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str = "127.0.0.1") -> str:
        """Listen on a free port and return the address, HOST:PORT."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"{host}:{port}"
        return self.address

    async def close(self) -> None:
        """End every connection and stop listening."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def connections(self) -> int:
        """Number of open connections of clients."""
        return len(self._writers) // 2

    def stall(self, *, there: bool = True, back: bool = True) -> None:
        """Block all data until `heal` is called, as a network partition does.

        `there` blocks data to the upstream, and `back` blocks data from it.
        """
        if there:
            self._there.open.clear()
        if back:
            self._back.open.clear()

    def delay(self, seconds: float) -> None:
        """Delay all data by `seconds` in each direction."""
        self._there.delay_s = self._back.delay_s = seconds

    def corrupt(self, share: float) -> None:
        """Flip bits in the given share of the chunks of each direction."""
        self._there.corrupt = self._back.corrupt = share

    def truncate(self) -> None:
        """Forward only a part of the next chunk that comes from the upstream, then end its
        connection."""
        self._back.truncate = True

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def shut(self) -> None:
        """Reset every connection and refuse new ones. `heal` does not undo this."""
        self._shut = True
        self.cut()

    def heal(self) -> None:
        """Remove all faults except `shut`."""
        for direction in (self._there, self._back):
            direction.open.set()
            direction.delay_s = direction.corrupt = 0.0
            direction.truncate = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream().rpartition(":")
        if self._shut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, self._there), name="chaos-proxy"),
            asyncio.create_task(self._pump(far_reader, writer, self._back), name="chaos-proxy"),
        ]
        self._tasks.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        # gRPC closes both directions at once: where one has ended, so has the other.
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._tasks.difference_update(pumps)
        for one in (writer, far_writer):
            self._writers.discard(one)
            one.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Direction
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if way.delay_s:
                    await asyncio.sleep(way.delay_s)
                await way.open.wait()
                if way.corrupt and self._rng.random() < way.corrupt:
                    data = flip_bits(data, self._rng)
                if way.truncate:
                    way.truncate = False
                    writer.write(data[: len(data) // 2])
                    return
                writer.write(data)
                await writer.drain()
