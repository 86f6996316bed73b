"""What the SDK does when a connection breaks: decisions, then both clients through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from outrider_router.requests.service import RouterService

from outrider.client import (
    AlreadyExistsError,
    AsyncClient,
    Client,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    RetryPolicy,
    UnavailableError,
)
from outrider.client.attempts import MAX_ROUTER_LOOKUPS, RequestAttempts, RetryDecision
from tests.fakes.proxy import Proxy, proxied
from tests.fakes.router import grpc_router, running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.waiting import until

STEADY = RetryPolicy(max_attempts=3, first_delay_s=1.0, max_delay_s=4.0, jitter=0.0, resume_s=10.0)
LOST, GONE = ConnectionLostError("cut"), NotFoundError("no such request")


def attempts(*, resumable: bool = True) -> RequestAttempts:
    return RequestAttempts(STEADY, resumable=resumable)


def test_a_stream_that_was_heard_is_resumed_soon_and_for_a_bounded_time() -> None:
    tries = attempts()
    pauses = [tries.decide_after(LOST, informed=True, told=True, now=0.0) for _ in range(6)]
    assert [again.delay_s for again in pauses] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]
    assert all(again.resume for again in pauses)
    with pytest.raises(ConnectionLostError):
        tries.decide_after(LOST, informed=True, told=True, now=10.1)
    tries.record_message()
    assert tries.decide_after(LOST, informed=True, told=True, now=20.0) == RetryDecision(
        0.02, resume=True
    )


def test_a_router_that_stops_is_waited_for_and_other_errors_are_final() -> None:
    stopping = UnavailableError("stopping", reason="SHUTDOWN")
    assert attempts().decide_after(stopping, informed=True, told=True, now=0.0).resume
    for error in (UnavailableError("no verifier", reason="VERIFIER_LOST"), GONE):
        with pytest.raises(type(error)):
            attempts().decide_after(error, informed=True, told=True, now=0.0)


def test_a_router_that_others_cannot_reach_is_waited_for_unless_nothing_was_heard() -> None:
    unreachable = UnavailableError("not here", reason="ROUTER_UNREACHABLE", retry_after_s=1.0)
    tries = attempts()
    assert tries.decide_after(LOST, informed=True, told=True, now=0.0).resume
    assert tries.decide_after(unreachable, informed=True, told=True, now=9.0).resume
    with pytest.raises(UnavailableError):
        tries.decide_after(unreachable, informed=True, told=True, now=10.1)
    tries = attempts()
    assert tries.decide_after(LOST, now=0.0) == RetryDecision(1.0, resume=True)
    sent_again = RetryDecision(0.0, resume=False, needs_new_id=True)
    assert tries.decide_after(unreachable, now=1.0) == sent_again


def test_an_attempt_that_broke_is_looked_for_before_it_is_sent_again() -> None:
    tries = attempts()
    assert tries.decide_after(LOST, now=0.0) == RetryDecision(1.0, resume=True)
    assert tries.decide_after(GONE, now=1.0) == RetryDecision(0.0, resume=False)
    assert tries.decide_after(AlreadyExistsError("it came late"), now=1.0) == RetryDecision(
        0.0, resume=True
    )
    tries = attempts()
    assert [tries.decide_after(LOST, now=0.0) for _ in range(2)] == [
        RetryDecision(1.0, resume=True),
        RetryDecision(2.0, resume=True),
    ]
    with pytest.raises(ConnectionLostError):
        tries.decide_after(LOST, now=0.0)


def test_a_request_whose_router_is_gone_for_good_is_sent_again_if_nothing_was_told() -> None:
    tries = attempts()
    assert tries.decide_after(LOST, informed=True, now=0.0).resume
    assert tries.decide_after(GONE, informed=True, now=0.1) == RetryDecision(1.0, resume=False)
    tries = attempts()
    assert tries.decide_after(LOST, informed=True, told=True, now=0.0).resume
    with pytest.raises(ConnectionLostError):
        tries.decide_after(GONE, informed=True, told=True, now=0.1)


def test_where_routers_share_an_address_others_are_asked_for_the_answer() -> None:
    elsewhere = NotFoundError("not here", reason="NO_STREAM", retry_after_s=0.02)
    tries = attempts()
    assert tries.decide_after(LOST, informed=True, told=True, now=0.0).resume
    looks = [
        tries.decide_after(elsewhere, informed=True, told=True, now=0.1)
        for _ in range(MAX_ROUTER_LOOKUPS)
    ]
    assert looks == [RetryDecision(0.02, resume=True)] * MAX_ROUTER_LOOKUPS
    with pytest.raises(ConnectionLostError):
        tries.decide_after(elsewhere, informed=True, told=True, now=0.2)
    # One that was never heard of is sent again where nobody has it.
    tries = attempts()
    assert tries.decide_after(LOST, now=0.0).resume
    looks = [tries.decide_after(elsewhere, now=0.1) for _ in range(MAX_ROUTER_LOOKUPS)]
    assert all(again.resume for again in looks)
    assert tries.decide_after(elsewhere, now=0.2) == RetryDecision(0.0, resume=False)


def test_without_resuming_a_break_is_retried_before_the_first_token_only() -> None:
    assert attempts(resumable=False).decide_after(LOST, informed=True, now=0.0) == RetryDecision(
        1.0, resume=False
    )
    with pytest.raises(ConnectionLostError):
        attempts(resumable=False).decide_after(LOST, informed=True, told=True, now=0.0)
    for error in (InvalidRequestError("bad"), AlreadyExistsError("another's")):
        with pytest.raises(OutriderError):
            attempts().decide_after(error, now=0.0)


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier(round_s=0.004)


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": verifier}, resume_grace_s=5.0) as service:
        yield service


@pytest.fixture
async def proxy(router: RouterService) -> AsyncGenerator[Proxy]:
    async with grpc_router(router) as address, proxied(address) as proxy:
        yield proxy


async def test_a_stream_survives_its_connection_again_and_again(
    router: RouterService, proxy: Proxy
) -> None:
    async with AsyncClient(proxy.address) as client:
        async with client.stream("abc", max_tokens=200) as stream:
            texts = []
            async for delta in stream:
                texts.append(delta.text)
                if len(texts) % 20 == 5 and len(texts) < 60:
                    proxy.cut()
        assert "".join(texts) == stream.text == ("abc" * 67)[:200]
        assert stream.finish is not None and stream.finish.usage.completion_tokens == 200
    assert proxy.connections >= 3
    assert sample(router, "outrider_resumed_streams_total") >= 2
    await until(lambda: not len(router.running_requests))


async def test_a_stream_finds_its_router_among_several_at_one_address(
    tmp_path: Path, verifier: FakeVerifier
) -> None:
    def shared(name: str) -> AbstractAsyncContextManager[RouterService]:
        folder = tmp_path / name
        folder.mkdir()
        return running_router(folder, {"v": verifier}, reuse_ports=True, resume_grace_s=5.0)

    async with (
        shared("one") as one,
        shared("two") as two,
        grpc_router(one) as address,
        grpc_router(two, address),
        proxied(address) as proxy,
        AsyncClient(proxy.address) as client,
        client.stream("abc", max_tokens=200) as stream,
    ):
        async for _ in stream:
            if len(stream.text) % 20 == 5:
                proxy.cut()
        assert stream.text == ("abc" * 67)[:200]
        # Half of the new connections lead to the other one.
        assert proxy.connections >= 3
    assert len(verifier.specs) == 1


async def test_an_answer_survives_the_connection_of_its_call(
    router: RouterService, verifier: FakeVerifier, proxy: Proxy
) -> None:
    async with AsyncClient(proxy.address, retry=RetryPolicy(first_delay_s=0.05)) as client:
        task = asyncio.create_task(client.generate("abc", max_tokens=60))
        await until(lambda: verifier.live)
        proxy.cut()
        assert (await task).text == "abc" * 20
    assert len(verifier.specs) == 1


async def test_without_resuming_the_end_of_the_connection_ends_the_request(
    router: RouterService, verifier: FakeVerifier, proxy: Proxy
) -> None:
    async with (
        AsyncClient(proxy.address) as client,
        client.stream("abc", max_tokens=1000, resume=False) as stream,
    ):
        await anext(stream)
        proxy.cut()
        with pytest.raises(ConnectionLostError):
            await stream.result()
    await until(lambda: not verifier.live and not len(router.running_requests))


async def test_whoever_stops_waiting_ends_the_request_at_once(
    router: RouterService, verifier: FakeVerifier, proxy: Proxy
) -> None:
    async with AsyncClient(proxy.address) as client:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.stream("abc", max_tokens=1500).result()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.generate("abc", max_tokens=1500)
    await until(lambda: not verifier.live and not len(router.resumables), timeout_s=2.0)
    assert sample(router, "outrider_requests_total", outcome="cancelled") == 4


async def test_the_synchronous_client_survives_its_connection_too(
    router: RouterService, verifier: FakeVerifier, proxy: Proxy
) -> None:
    loop = asyncio.get_running_loop()

    def use() -> str:
        with Client(proxy.address, retry=RetryPolicy(first_delay_s=0.05)) as client:
            with client.stream("abc", max_tokens=100) as stream:
                for count, _ in enumerate(stream):
                    if count in (3, 30):
                        loop.call_soon_threadsafe(proxy.cut)
            loop.call_soon_threadsafe(loop.call_later, 0.1, proxy.cut)
            whole = client.generate("abc", max_tokens=100)
            assert whole.text == stream.text
            with client.stream("abc", max_tokens=1500) as left:
                next(left)
            return stream.text

    assert await asyncio.to_thread(use) == ("abc" * 34)[:100]
    await until(lambda: not verifier.live and not len(router.running_requests))
