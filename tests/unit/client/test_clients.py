"""Both clients against a router on fake verifiers, over gRPC on loopback."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
from outrider_router.requests.service import RouterService

from outrider.client import (
    AsyncClient,
    CancelledRequestError,
    Client,
    DeadlineExceededError,
    DraftMethod,
    FinishReason,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    RetryPolicy,
    Rule,
    UnavailableError,
    async_client,
    rpcs,
    user,
)
from outrider.client.async_calls import AbortSender
from outrider.client.rpcs import GENERATE_STREAM, Rpc
from outrider.errors import InvalidMessageError
from tests.fakes.router import grpc_router, running_router
from tests.fakes.verifier import FakeVerifier
from tests.waiting import soon, until, wait_until

NO_RETRY = RetryPolicy(max_attempts=1)
FAST = RetryPolicy(first_delay_s=0.01, max_delay_s=0.02)


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    async with running_router(
        tmp_path, {"v": verifier}, queue_limit=1, failover_timeout_s=0.3
    ) as service:
        yield service


@pytest.fixture
async def address(router: RouterService) -> AsyncGenerator[str]:
    async with grpc_router(router) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncGenerator[AsyncClient]:
    async with AsyncClient(address, retry=NO_RETRY) as client:
        yield client


def idle(router: RouterService, verifier: FakeVerifier) -> bool:
    return (
        not verifier.live
        and len(router.running_requests) == 0
        and router.admission.num_running == 0
    )


async def test_every_kind_of_prompt_is_answered(
    client: AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    text = await client.generate("abc", max_tokens=4)
    assert (text.text, text.finish.reason) == ("abca", FinishReason.LENGTH)
    ids = router.tokenizer.encode("xy")
    assert (await client.generate(ids, max_tokens=2)).text == "xy"
    await client.generate([user("Hi")], max_tokens=1)
    assert verifier.specs[-1].token_ids == router.tokenizer.encode_chat(
        [{"role": "user", "content": "Hi"}]
    )


async def test_options_reach_the_verifier_zeros_included(
    client: AsyncClient, verifier: FakeVerifier
) -> None:
    await client.generate(
        "a",
        max_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        seed=0,
        rule="rejection",
        drafter="ngram",
        draft_tokens=7,
        draft_top_k=2,
        banned_token_ids=[5],
        allowed_token_ids=[5, 6],
        bad_words=["ab"],
    )
    spec = verifier.specs[-1]
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.seed) == (0.5, 0.9, 0)
    assert spec.sampling.rule is Rule.REJECTION and spec.sampling.banned_ids == (5,)
    assert spec.token_limits is not None and spec.token_limits.allowed_ids == (5, 6)
    assert len(spec.token_limits.bad_words) == 2
    assert (spec.plan.method, spec.plan.draft_tokens, spec.plan.top_k) == (
        DraftMethod.NGRAM,
        7,
        2,
    )


async def test_the_ids_of_a_prompt_are_told_whole_and_streamed(
    client: AsyncClient, router: RouterService
) -> None:
    ids = router.tokenizer.encode("abc")
    result = await client.generate("abc", max_tokens=2, return_prompt_token_ids=True)
    assert result.prompt_token_ids == ids
    alone = await client.generate("abc", max_tokens=2, return_prompt_token_ids=True, resume=False)
    assert alone.prompt_token_ids == ids
    async with client.stream("abc", max_tokens=2, return_prompt_token_ids=True) as stream:
        _ = [delta async for delta in stream]
    assert stream.info is not None and stream.info.prompt_token_ids == ids
    assert (await client.generate("abc", max_tokens=2)).prompt_token_ids == ()


async def test_a_stream_yields_deltas_and_keeps_the_rest_at_hand(client: AsyncClient) -> None:
    async with client.stream("abc", max_tokens=5) as stream:
        texts = [delta.text async for delta in stream]
    assert "".join(texts) == stream.text == "abcab"
    assert stream.info is not None and stream.info.prompt_tokens == 3
    assert stream.finish is not None and stream.finish.usage.completion_tokens == 5


async def test_leaving_the_context_early_cancels_the_request(
    client: AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    async with client.stream("abc", max_tokens=1000) as stream:
        await anext(stream)
        assert verifier.live
    await until(lambda: idle(router, verifier))


async def test_closing_a_client_aborts_what_it_asked_for_and_nobody_has_left(
    address: str, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    client = AsyncClient(address, retry=NO_RETRY)
    # Lists are no keys of dictionaries, and what goes with a request is one.
    said: list[list[str]] = [["x-said", "so"]]
    stream = client.stream("abc", max_tokens=1000, metadata=said)  # type: ignore[arg-type]
    await anext(stream)
    whole = asyncio.create_task(client.generate("abc", max_tokens=1000))
    await until(lambda: len(verifier.live) == 2)
    await client.close()
    # At once, not after the time that a router keeps what broke off.
    await until(lambda: idle(router, verifier))
    for answer in (whole, stream.result(), client.generate("abc"), client.server_info()):
        with pytest.raises(CancelledRequestError):
            await answer
    await stream.close()


@pytest.mark.parametrize("resume", [True, False])
async def test_who_reads_while_the_client_is_closed_hears_so(
    address: str, router: RouterService, verifier: FakeVerifier, resume: bool
) -> None:
    verifier.round_s = 0.01
    client = AsyncClient(address, retry=NO_RETRY)
    heard = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("abc", max_tokens=1000, resume=resume):
            heard.set()

    reading = asyncio.create_task(read())
    await heard.wait()
    await client.close()
    with pytest.raises(CancelledRequestError) as caught:
        await soon(reading)
    assert caught.value.reason == "CLIENT_CLOSED"
    await until(lambda: idle(router, verifier))


async def test_a_synchronous_client_that_is_closed_under_its_users_says_so(
    address: str, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01

    def use(client: Client) -> str:
        with pytest.raises(CancelledRequestError) as caught:
            while True:
                client.server_info()
        stream = client.stream("abc", max_tokens=1000)
        with pytest.raises(CancelledRequestError):
            next(stream)
        stream.close()
        return caught.value.reason

    def close_under_them() -> None:
        for _ in range(10):
            client = Client(address, retry=NO_RETRY)
            # What goes with each is its own, as with traces.
            streams = [
                client.stream("abc", max_tokens=1000, resume=n != 0, metadata=(("x-n", str(n)),))
                for n in range(3)
            ]
            for stream in streams:
                next(stream)
            with ThreadPoolExecutor(4) as threads:
                reasons = [threads.submit(use, client) for _ in range(4)]
                time.sleep(0.02)
                client.close()
                assert {reason.result() for reason in reasons} == {"CLIENT_CLOSED"}
            for stream in streams:
                with pytest.raises(CancelledRequestError):
                    stream.result()

    await asyncio.to_thread(close_under_them)
    await until(lambda: idle(router, verifier))


async def test_the_synchronous_client_aborts_them_too(
    address: str, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01

    def use() -> None:
        client = Client(address, retry=NO_RETRY)
        stream = client.stream("abc", max_tokens=1000)
        next(stream)
        with ThreadPoolExecutor(1) as threads:
            whole = threads.submit(client.generate, "abc", max_tokens=1000)
            wait_until(lambda: len(verifier.live) == 2)
            client.close()
            for result in (whole.result, stream.result, client.server_info):
                with pytest.raises(CancelledRequestError):
                    result()
            stream.close()

    await asyncio.to_thread(use)
    await until(lambda: idle(router, verifier))


async def test_what_a_client_waits_for_is_forgotten_when_it_has_come_or_is_dropped(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[AbortSender] = []

    class Noted(AbortSender):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            senders.append(self)

    monkeypatch.setattr(async_client, "AbortSender", Noted)
    async with AsyncClient(address, retry=NO_RETRY) as client:
        (sender,) = senders
        wanted = sender.wanted
        await client.generate("abc", max_tokens=2)
        await client.stream("abc", max_tokens=2).result()
        with pytest.raises(InvalidRequestError):
            await client.generate("abc", max_tokens=5000)
        with pytest.raises(NotFoundError):
            await client.stream("abc", model="other").result()
        assert not wanted.take_all()
        stream = client.stream("abc", max_tokens=1000)
        await anext(stream)
        del stream
        gc.collect()
        assert not wanted.take_all()


async def test_cancelling_a_unary_call_cancels_the_request(
    client: AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    task = asyncio.create_task(client.generate("abc", max_tokens=1000))
    await until(lambda: verifier.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: idle(router, verifier))


async def test_abort_by_id_ends_the_stream_with_a_typed_error(
    client: AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    async with client.stream("abc", max_tokens=1000, request_id="mine") as stream:
        await anext(stream)
        assert await client.abort(["mine", "other"]) == ("mine",)
        with pytest.raises(CancelledRequestError) as caught:
            await stream.result()
    assert caught.value.reason == "ABORTED"
    await until(lambda: idle(router, verifier))


async def test_a_timeout_is_a_deadline_for_the_server_too(
    client: AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    with pytest.raises(DeadlineExceededError):
        await client.generate("abc", max_tokens=1000, timeout_s=0.2)
    await until(lambda: idle(router, verifier))


async def test_errors_keep_their_type_message_and_reason(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens is 5000") as caught:
        await client.generate("abc", max_tokens=5000)
    assert caught.value.reason == "CONTEXT_EXCEEDED"
    with pytest.raises(NotFoundError):
        await client.generate("abc", model="other")


async def test_a_full_queue_raises_with_the_hint_and_is_retried_by_policy(
    client: AsyncClient, address: str, verifier: FakeVerifier
) -> None:
    verifier.change_info(max_sessions=1)
    verifier.gate = asyncio.Event()
    await asyncio.sleep(0.1)
    holders = [asyncio.create_task(client.generate("a", max_tokens=1)) for _ in range(2)]
    await until(lambda: len(verifier.live) == 1)
    await asyncio.sleep(0.1)
    with pytest.raises(ResourceExhaustedError) as caught:
        await client.generate("b", max_tokens=1)
    assert caught.value.reason == "QUEUE_FULL" and caught.value.retry_after_s is not None
    async with AsyncClient(address, retry=RetryPolicy(max_attempts=5)) as patient:
        later = asyncio.create_task(patient.generate("b", max_tokens=1))
        await asyncio.sleep(0.1)
        assert not later.done()
        verifier.gate.set()
        assert (await later).text == "b"
    await asyncio.gather(*holders)


async def test_an_unreachable_router_is_a_typed_error_after_the_retries() -> None:
    async with AsyncClient("127.0.0.1:1", retry=FAST) as client:
        with pytest.raises(UnavailableError):
            await client.generate("abc")
        with pytest.raises(UnavailableError):
            await client.stream("abc").result()


async def test_a_stream_is_retried_before_the_first_token_only(
    router: RouterService, address: str, verifier: FakeVerifier
) -> None:
    async with AsyncClient(address, retry=RetryPolicy(max_attempts=8)) as client:
        verifier.gate = asyncio.Event()
        stream = client.stream("abc", max_tokens=3)
        reading = asyncio.create_task(stream.result())
        await until(lambda: verifier.live)
        verifier.lost.set()
        await asyncio.sleep(0.1)
        verifier.gate = None
        verifier.lost.clear()
        assert (await reading).text == "abc"

        verifier.round_s = 0.01
        async with client.stream("abc", max_tokens=1000) as begun:
            await anext(begun)
            verifier.lost.set()
            with pytest.raises(UnavailableError) as caught:
                await begun.result()
        assert caught.value.reason == "VERIFIER_LOST"
        assert begun.text.startswith("a")


async def test_server_info_and_models(client: AsyncClient, router: RouterService) -> None:
    info = await client.server_info()
    assert (info.queue_bound, info.running, info.verifiers[0].healthy) == (1, 0, True)
    (model,) = await client.models()
    assert (model.name, model.tokenizer_hash) == ("fake", router.tokenizer.hash)


async def test_sixty_four_streams_at_once(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.002, kv_blocks=4096)
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        grpc_router(router) as address,
        AsyncClient(address) as client,
    ):
        texts = await asyncio.gather(
            *(client.stream(f"{i:02d}", max_tokens=64).result() for i in range(64))
        )
        assert [result.text for result in texts] == [f"{i:02d}" * 32 for i in range(64)]
        await until(lambda: idle(router, verifier))


async def test_the_synchronous_client_does_the_same(
    address: str, router: RouterService, verifier: FakeVerifier
) -> None:
    def use() -> None:
        with Client(address, retry=NO_RETRY) as client:
            assert client.generate("abc", max_tokens=4).text == "abca"
            with client.stream("abc", max_tokens=4) as stream:
                assert "".join(delta.text for delta in stream) == "abca"
            assert client.models()[0].name == "fake"
            assert client.server_info().verifiers[0].healthy
            assert client.abort(["nothing"]) == ()
            with pytest.raises(InvalidRequestError):
                client.generate("abc", max_tokens=5000)
            with pytest.raises(NotFoundError):
                client.stream("abc", model="other").result()
            verifier.round_s = 0.01
            with client.stream("abc", max_tokens=1000) as long:
                next(long)
            with pytest.raises(DeadlineExceededError):
                client.generate("abc", max_tokens=1000, timeout_s=0.2)

    await asyncio.to_thread(use)
    await until(lambda: idle(router, verifier))


def test_an_unreachable_router_is_a_typed_error_for_the_synchronous_client() -> None:
    started = time.monotonic()
    with Client("127.0.0.1:1", retry=FAST, timeout_s=10) as client:
        with pytest.raises(UnavailableError):
            client.generate("abc")
        with pytest.raises(UnavailableError):
            client.stream("abc").result()
    assert time.monotonic() - started < 9


# ---- streams that failed, asked again ----------------------------------------------------------


async def test_a_failed_stream_raises_its_error_as_often_as_it_is_asked(
    client: AsyncClient, address: str, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    stream = client.stream("abc", max_tokens=1000, request_id="mine", resume=False)
    await anext(stream)
    await client.abort(["mine"])
    for _ in range(3):
        with pytest.raises(CancelledRequestError) as raised:
            await stream.result()
        assert raised.value.reason == "ABORTED"
    await stream.close()
    with pytest.raises(CancelledRequestError, match="aborted"):
        await stream.result()
    refused = client.stream("abc", max_tokens=10**6)
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as invalid:
            await refused.result()
        assert invalid.value.reason == "CONTEXT_EXCEEDED"

    def synchronous() -> None:
        with Client(address, retry=NO_RETRY) as other:
            refused = other.stream("abc", max_tokens=10**6)
            for _ in range(2):
                with pytest.raises(InvalidRequestError) as invalid:
                    refused.result()
                assert invalid.value.reason == "CONTEXT_EXCEEDED"

    await asyncio.to_thread(synchronous)


async def test_a_stream_that_was_closed_before_its_end_says_so(
    client: AsyncClient, address: str, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    async with client.stream("abc", max_tokens=1000) as stream:
        await anext(stream)
    for _ in range(2):
        with pytest.raises(CancelledRequestError) as closed:
            await stream.result()
        assert closed.value.reason == "STREAM_CLOSED"

    def synchronous() -> None:
        with Client(address, retry=NO_RETRY) as other:
            with other.stream("abc", max_tokens=1000) as stream:
                next(stream)
            for _ in range(2):
                with pytest.raises(CancelledRequestError) as closed:
                    stream.result()
                assert closed.value.reason == "STREAM_CLOSED"

    await asyncio.to_thread(synchronous)
    await until(lambda: idle(router, verifier))


async def test_an_answer_that_makes_no_sense_ends_its_stream_with_one_error(
    client: AsyncClient,
    address: str,
    router: RouterService,
    verifier: FakeVerifier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier.round_s = 0.01
    malformed = Rpc(GENERATE_STREAM.name, GENERATE_STREAM.encode, _nonsense)
    monkeypatch.setattr(rpcs, "GENERATE_STREAM", malformed)
    stream = client.stream("abc", max_tokens=1000)
    for _ in range(2):
        with pytest.raises(InternalError, match="malformed"):
            await stream.result()
    await until(lambda: idle(router, verifier))

    def synchronous() -> None:
        with Client(address, retry=NO_RETRY) as other:
            stream = other.stream("abc", max_tokens=1000)
            for _ in range(2):
                with pytest.raises(InternalError, match="malformed"):
                    stream.result()

    await asyncio.to_thread(synchronous)
    await until(lambda: idle(router, verifier))


def _nonsense(_data: bytes) -> NoReturn:
    raise InvalidMessageError("nonsense")
