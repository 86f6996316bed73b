"""Connections that say nothing, or say it slowly, cost themselves alone."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from outrider_router.api.http import connection_slots, connections
from outrider_router.requests.service import RouterService

from tests.fakes.router import sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_router, set_http_options
from tests.waiting import until

ENOUGH_S = 30.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = {"prompt": "abc", "max_tokens": 2}


class Socket:
    """One connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def closed(self) -> bytes:
        """Wait until the other side closes; what it said."""
        try:
            return await asyncio.wait_for(self._reader.read(), ENOUGH_S)
        except ConnectionError:
            return b""

    async def dribble(self, first: bytes) -> None:
        """Send something now and then until it is closed; fails if it never is."""
        closed = asyncio.create_task(self.closed())
        async with asyncio.timeout(ENOUGH_S):
            while not closed.done():
                try:
                    await self.send(first)
                except ConnectionError:
                    break
                first = b"a"
                await asyncio.wait([closed], timeout=0.05)
        await closed

    async def ask(self, path: str) -> str:
        """A GET; the whole answer."""
        await self.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        head = (await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), ENOUGH_S)).decode()
        length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
        return head + (await self._reader.readexactly(int(length))).decode()

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def sockets(url: str, count: int) -> AsyncGenerator[list[Socket]]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Socket(*await asyncio.open_connection(host, int(port))))
            stack.callback(made[-1].close)
        yield made


async def complete(url: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=ENOUGH_S, trust_env=False) as client:
        return await client.post("/v1/completions", json=BODY)


@pytest.mark.parametrize(
    "first", [b"", b"GET /version HTTP/1.1\r\nx-long: ", HEAD + b"content-length: 99999\r\n\r\n"]
)
async def test_heads_and_bodies_have_to_come_in_time(router: RouterService, first: bytes) -> None:
    set_http_options(router, head_s=0.3, body_s=0.3)
    async with http_router(router) as url, sockets(url, 2) as (dribbling, silent):
        await dribbling.dribble(first or b"G")
        if first:
            await silent.send(first)
        await silent.closed()


async def test_a_further_request_has_its_time_from_its_first_byte(
    router: RouterService,
) -> None:
    set_http_options(router, head_s=0.2)
    async with http_router(router) as url, sockets(url, 1) as (kept,):
        for _ in range(3):
            assert "200 OK" in await kept.ask("/version")
            # Longer than a head may take: between two requests another time counts.
            await asyncio.sleep(0.3)
        await kept.dribble(b"GET /version")


async def test_a_connection_without_requests_is_closed(
    router: RouterService,
) -> None:
    set_http_options(router, keep_alive_s=0.2)
    async with http_router(router) as url, sockets(url, 1) as (kept,):
        assert "200 OK" in await kept.ask("/version")
        assert await kept.closed() == b""


async def test_idle_connections_make_room_the_one_that_was_idle_longest_first(
    router: RouterService,
) -> None:
    set_http_options(router, max_connections=8)
    async with http_router(router) as url, sockets(url, 8) as idle:
        assert "200 OK" in await idle[0].ask("/version"), "idle again, later than all others"
        for _ in range(3):
            answer = await complete(url)
            assert answer.json()["choices"][0]["text"] == "ab"
        assert await idle[1].closed() == b""
        assert "200 OK" in await idle[0].ask("/version")
        assert sample(router, "outrider_refusals_total", reason="CONNECTIONS_EXHAUSTED") == 0


class Held:
    """A connection as far as places know it."""

    def __init__(self, *, is_sent: bool) -> None:
        self.is_sent, self.was_cut = is_sent, False

    def close_now(self) -> None:
        self.was_cut = True


def test_an_answer_that_its_reader_has_not_taken_is_not_cut() -> None:
    slow, idle, third, fourth = (Held(is_sent=sent) for sent in (False, True, True, False))
    held: Any = connection_slots.ConnectionSlots(2, lambda: None)
    assert held.acquire_slot(slow) and held.acquire_slot(idle)
    assert held.acquire_slot(third)
    assert idle.was_cut and not slow.was_cut
    third.is_sent = False
    assert not held.acquire_slot(fourth)
    assert not third.was_cut


def test_silent_connections_make_way_before_idle_ones() -> None:
    idle, silent, busy = (Held(is_sent=True) for _ in range(3))
    held: Any = connection_slots.ConnectionSlots(3, lambda: None)
    for each in (idle, silent, busy):
        assert held.acquire_slot(each)
    held.mark_idle(idle)
    held.mark_busy(busy)
    assert held.acquire_slot(Held(is_sent=True))
    assert (silent.was_cut, idle.was_cut, busy.was_cut) == (True, False, False)


async def test_many_silent_connections_shut_nobody_out(
    router: RouterService,
) -> None:
    set_http_options(router, max_connections=50)
    async with http_router(router) as url, sockets(url, 200):
        answers = await asyncio.gather(*(complete(url) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4


async def test_whoever_waits_for_an_answer_keeps_its_place_and_others_hear_why(
    router: RouterService, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_http_options(router, max_connections=2)
    verifier.gate = asyncio.Event()
    body = json.dumps(BODY).encode()
    ask = HEAD + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    async with http_router(router) as url, sockets(url, 2) as running:
        for connection in running:
            await connection.send(ask)
        await until(lambda: len(verifier.live) == 2, ENOUGH_S)
        refused = await complete(url)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "connections_exhausted"
        monkeypatch.setattr(connections, "REFUSAL_TIMEOUT_S", 0.1)
        async with sockets(url, 1) as (silent,):
            assert await silent.closed() == b""
        monkeypatch.setattr(connection_slots, "MAX_REFUSALS", 0)
        with pytest.raises(httpx.TransportError):
            await complete(url)
        assert sample(router, "outrider_refusals_total", reason="CONNECTIONS_EXHAUSTED") == 3
        verifier.gate.set()
        for connection in running:
            assert b'"text":"ab"' in (await connection.closed()).replace(b": ", b":")
        assert (await complete(url)).status_code == 200


CHUNKED = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def test_a_body_may_have_so_many_small_chunks_and_is_told_of_one_more(
    router: RouterService,
) -> None:
    body = json.dumps(BODY).encode()
    set_http_options(router, max_small_chunks=len(body))
    async with http_router(router) as url, sockets(url, 2) as (allowed, refused):
        await allowed.send(CHUNKED + b"\r\n" + chunked(body, 1))
        assert b'"text":"ab"' in (await allowed.closed()).replace(b": ", b":")
        await refused.send(CHUNKED + b"\r\n" + chunked(body + b" ", 1))
        head, _, told = (await refused.closed()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert f"more than {len(body)} chunks" in json.loads(told)["error"]["message"]


async def test_large_chunks_are_not_counted(router: RouterService) -> None:
    set_http_options(router, max_small_chunks=1)
    body = json.dumps(BODY | {"user": "x" * 8192}).encode()
    async with http_router(router) as url, sockets(url, 1) as (connection,):
        await connection.send(CHUNKED + b"\r\n" + chunked(body, 1024))
        assert b"200 OK" in await connection.closed()


async def test_a_request_of_two_lengths_is_answered_and_its_connection_closed(
    router: RouterService,
) -> None:
    body = json.dumps(BODY).encode()
    head = HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n"
    async with http_router(router) as url, sockets(url, 1) as (connection,):
        smuggled = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        await connection.send(head + chunked(body, 1024) + smuggled)
        answer = await connection.closed()
        assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer.lower()


async def test_what_is_not_http_is_told_so_in_openais_form(router: RouterService) -> None:
    async with http_router(router) as url, sockets(url, 1) as (connection,):
        await connection.send(b"HELO mail\r\n\r\n")
        head, _, told = (await connection.closed()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(told)["error"]["type"] == "invalid_request_error"


async def test_places_are_taken_when_a_connection_is_accepted_and_the_reserve_stays() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_slots.max_connections(4096) == min(4096, files // 2)
    assert connection_slots.max_connections(10**9) == files // 2
