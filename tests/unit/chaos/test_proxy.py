"""A TCP proxy carries bytes, and stalls, cuts, shortens and changes them when told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from outrider.chaos.proxy import TcpProxy
from tests.waiting import soon, until


@asynccontextmanager
async def proxied() -> AsyncGenerator[TcpProxy]:
    """A proxy in front of a server that sends back what it reads."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = TcpProxy(lambda: f"127.0.0.1:{port}")
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()
        await server.wait_closed()


async def dial(proxy: TcpProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_bytes_come_back_as_they_were() -> None:
    async with proxied() as proxy:
        reader, writer = await dial(proxy)
        data = bytes(range(256)) * 400
        writer.write(data)
        assert await soon(reader.readexactly(len(data))) == data
        writer.close()
        await until(lambda: proxy.connections == 0)


@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
async def test_a_stalled_direction_goes_on_when_it_is_healed(back: bool) -> None:
    async with proxied() as proxy:
        reader, writer = await dial(proxy)
        proxy.stall(there=not back, back=back)
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(5), 0.1)
        proxy.heal()
        assert await soon(reader.readexactly(5)) == b"hello"
        writer.close()


async def test_a_cut_ends_every_connection_and_lets_new_ones_in() -> None:
    async with proxied() as proxy:
        reader, writer = await dial(proxy)
        writer.write(b"hello")
        await soon(reader.readexactly(5))
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await soon(reader.readexactly(1))
        writer.close()
        reader, writer = await dial(proxy)
        writer.write(b"again")
        assert await soon(reader.readexactly(5)) == b"again"
        writer.close()


async def test_a_truncated_chunk_is_the_connections_last() -> None:
    async with proxied() as proxy:
        reader, writer = await dial(proxy)
        proxy.truncate()
        writer.write(b"0123456789")
        assert await soon(reader.read()) == b"01234"
        writer.close()


async def test_corrupted_chunks_have_their_length_and_other_bits() -> None:
    async with proxied() as proxy:
        reader, writer = await dial(proxy)
        proxy.corrupt(1.0)
        data = bytes(1000)
        writer.write(data)
        heard = await soon(reader.readexactly(1000))
        assert heard != data
        assert sum(byte.bit_count() for byte in heard) <= 16
        writer.close()


async def test_nothing_behind_the_proxy_ends_the_connection() -> None:
    proxy = TcpProxy(lambda: "127.0.0.1:1")
    await proxy.start()
    reader, writer = await dial(proxy)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await soon(reader.readexactly(1))
    writer.close()
    await proxy.close()
