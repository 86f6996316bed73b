"""A TCP proxy whose connections can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Proxy:
    """Passes bytes on to one address, until it is told not to."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.refusing = False
        """Whether new connections are closed at once."""
        self.connections = 0
        """Connections that were ever passed on."""

    def cut(self) -> None:
        """Break every connection, as a lost network or a dead peer does."""
        for writer in list(self._writers):
            writer.transport.abort()

    def redirect(self, target: str) -> None:
        """Pass new connections on to another address."""
        self._target = target

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        if self.refusing:
            writer.close()
            return
        self.connections += 1
        host, _, port = self._target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def proxied(target: str) -> AsyncGenerator[Proxy]:
    """A proxy on a free port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await asyncio.sleep(0.01)
