"""OpenAI's own client finds here what it finds there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from outrider_router.requests.service import RouterService

from outrider.client import AsyncClient
from tests.fakes.router import grpc_router, running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import KEY, http_router, openai_client
from tests.unit.router.helpers import assert_all_freed
from tests.waiting import until

HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_completion_is_answered_at_once_and_as_a_stream(router: RouterService) -> None:
    async with openai_client(router) as client:
        whole = await client.completions.create(model="fake", prompt="abc", max_tokens=7)
        stream = await client.completions.create(
            model="fake", prompt="abc", max_tokens=7, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == "abcabca"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 7)
    details = whole.usage.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens == 0
    cached = whole.usage.prompt_tokens_details
    assert cached is not None and cached.cached_tokens == 0
    assert whole.id.startswith("cmpl-")


async def test_a_chat_is_answered_at_once_and_as_a_stream(router: RouterService) -> None:
    async with openai_client(router) as client:
        whole = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9)
        stream = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            max_completion_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    *parts, last = chunks
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == whole.choices[0].message.content == "user\nhel"
    assert parts[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == whole.usage


async def test_the_synchronous_client_is_served_as_well(router: RouterService) -> None:
    def ask(url: str) -> tuple[str, str]:
        with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=30.0) as client:
            whole = client.completions.create(model="fake", prompt="abc", max_tokens=4)
            with client.completions.create(
                model="fake", prompt="abc", max_tokens=4, stream=True
            ) as stream:
                streamed = "".join(chunk.choices[0].text for chunk in stream)
        return whole.choices[0].text, streamed

    async with http_router(router) as url:
        assert await asyncio.to_thread(ask, url) == ("abca", "abca")


async def test_models_are_listed_and_found(router: RouterService) -> None:
    async with openai_client(router) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


async def test_a_prompt_may_have_several_answers_and_a_body_several_prompts(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(script=lambda spec: [67 + spec.sampling.seed % 26] * 3)
    async with running_router(tmp_path, {"v": verifier}) as router, openai_client(router) as client:
        answer = await client.completions.create(
            model="fake", prompt=["xy", "z"], n=2, seed=26, max_tokens=3
        )
    assert [choice.text for choice in answer.choices] == ["aaa", "bbb"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


async def test_the_first_answer_is_that_of_the_same_seed_over_grpc(tmp_path: Path) -> None:
    verifier = FakeVerifier(script=lambda spec: [67 + spec.sampling.seed * 7 % 26] * 3)
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        openai_client(router) as client,
        grpc_router(router) as address,
        AsyncClient(address) as grpc_client,
    ):
        answer = await client.completions.create(
            model="fake", prompt="ab", n=3, seed=5, max_tokens=3
        )
        over_grpc = [
            (await grpc_client.generate("ab", seed=seed, max_tokens=3, temperature=1.0)).text
            for seed in (5, 6, 7)
        ]
    assert [choice.text for choice in answer.choices] == over_grpc
    first, same = verifier.specs[0], verifier.specs[3]
    assert (first.sampling, first.plan) == (same.sampling, same.plan)


async def test_errors_are_the_classes_that_its_users_catch(router: RouterService) -> None:
    async with openai_client(router) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="fake", prompt="a", temperature=-1)
        assert bad.value.param == "temperature" and "greater than or equal" in str(bad.value)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="fake", prompt="a", max_tokens=10_000)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="gpt-4o", prompt="a")
        with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
            await client.completions.create(model="fake", prompt="a", suffix="b")


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1)
    verifier.gate = asyncio.Event()
    async with (
        running_router(tmp_path, {"v": verifier}, queue_limit=0) as router,
        openai_client(router) as client,
    ):
        first = asyncio.create_task(client.completions.create(model="fake", prompt="a"))
        await until(lambda: verifier.live)
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(model="fake", prompt="b")
        assert raised.value.code == "queue_full"
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert float(raised.value.response.headers["retry-after-ms"]) >= 50
        verifier.gate.set()
        assert (await first).choices[0].text == "a" * 16


async def test_without_a_verifier_the_client_tries_again_until_there_is_one(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier()
    verifier.lost.set()
    async with (
        running_router(tmp_path, {"v": verifier}, wait=False) as router,
        openai_client(router, max_retries=0) as once,
        openai_client(router, max_retries=100) as patient,
    ):
        with pytest.raises(openai.InternalServerError) as raised:
            await once.completions.create(model="fake", prompt="a")
        assert raised.value.status_code == 503 and raised.value.code == "no_verifier"
        asking = asyncio.create_task(patient.completions.create(model="fake", prompt="a"))
        await asyncio.sleep(0.05)
        verifier.restart()
        assert (await asyncio.wait_for(asking, 60.0)).choices[0].text == "a" * 16


async def test_an_error_in_mid_stream_is_raised_by_the_client(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.005
    async with openai_client(router) as client:
        stream = await client.completions.create(
            model="fake",
            prompt="abc",
            max_tokens=1000,
            stream=True,
            extra_headers={"X-Request-Id": "to-abort"},
        )
        heard = 0
        with pytest.raises(openai.APIError, match="was aborted"):
            async for _ in stream:
                heard += 1
                router.abort_requests(["to-abort"])  # type: ignore[list-item]
    assert heard
    await assert_all_freed(router, verifier)


async def leave(client: AsyncOpenAI, verifier: FakeVerifier, *, stream: bool) -> None:
    """Ask for a long answer, and go when it is being made."""
    asking = asyncio.create_task(
        client.completions.create(model="fake", prompt="abc", max_tokens=2000, stream=stream)
    )
    await until(lambda: verifier.live, 30.0)
    if stream:
        chunks = await asking
        await anext(aiter(chunks))
        await chunks.close()
    else:
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(
    router: RouterService, verifier: FakeVerifier, stream: bool
) -> None:
    verifier.round_s = 0.005
    async with openai_client(router) as client:
        await leave(client, verifier, stream=stream)
        await assert_all_freed(router, verifier)
    ended = router.metrics.registry.get_sample_value(
        "outrider_requests_total", {"outcome": "cancelled"}
    )
    assert ended == 1


async def test_leaving_ends_every_choice_also_those_that_wait(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    async with openai_client(router) as client:
        asking = asyncio.create_task(client.completions.create(model="fake", prompt="abc", n=4))
        await until(lambda: len(verifier.live) == 4, 30.0)
        asking.cancel()
        await assert_all_freed(router, verifier)
