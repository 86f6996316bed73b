"""Server-sent events: their framing, many at once, and readers that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest
from outrider_router.api.http.server import bind_socket
from outrider_router.base.slow_readers import SLOW_READER as SLOW
from outrider_router.config import OverloadConfig
from outrider_router.requests.service import RouterService

from outrider.errors import FailedPreconditionError
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import chunks, events, http_client, http_router, texts
from tests.unit.router.helpers import assert_all_freed
from tests.waiting import until

STREAMS = 96


async def streamed(client: httpx.AsyncClient, **body: object) -> str:
    answer = await client.post("/v1/completions", json={"stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    return answer.text


async def test_a_stream_is_chunks_of_one_answer_and_a_last_word(router: RouterService) -> None:
    async with http_client(router) as client:
        parts = chunks(await streamed(client, prompt="abc", max_tokens=5))
    assert texts(parts) == ["abcab"]
    assert len({(part["id"], part["created"], part["object"]) for part in parts}) == 1
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert all("usage" not in part for part in parts)


async def test_usage_and_speculation_come_last_when_they_are_asked_for(
    router: RouterService,
) -> None:
    async with http_client(router) as client:
        options = {"include_usage": True}
        body = await streamed(client, prompt="abc", max_tokens=5, n=2, stream_options=options)
    *parts, last = chunks(body)
    assert texts(parts, 2) == ["abcab"] * 2
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 10)
    assert last["metrics"]["speculative_decoding"]["rounds"] == 8
    assert all(part["usage"] is None for part in parts)


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}])
async def test_every_chunk_of_a_chat_has_usage_if_it_is_asked_for(
    router: RouterService, more: dict[str, bool]
) -> None:
    messages = [{"role": "user", "content": "abc"}]
    options = {"include_usage": True}
    body = {"messages": messages, "stream": True, "max_tokens": 5, "stream_options": options}
    async with http_client(router) as client:
        answer = await client.post("/v1/chat/completions", json=body | more)
    *parts, last = chunks(answer.text)
    assert [part["usage"] for part in parts] == [None] * len(parts)
    assert last["usage"]["completion_tokens"] == 5


async def test_usage_counts_the_cached_tokens_of_the_first_choice_of_each_prompt(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier()
    # The first choice of a prompt has its seed, the second one the seed that follows.
    verifier.cached = lambda spec: 2 if spec.sampling.seed == 5 else 1
    body = {"prompt": ["abc", "abcd"], "n": 2, "seed": 5, "max_tokens": 2}
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        http_client(router) as client,
    ):
        whole = (await client.post("/v1/completions", json=body)).json()
        more = {"stream_options": {"include_usage": True}}
        *parts, last = chunks(await streamed(client, **body, **more))
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert last["usage"] == whole["usage"]
    assert list(whole["usage"]) == [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    ]
    assert parts


async def test_usage_may_be_told_with_every_chunk(router: RouterService) -> None:
    async with http_client(router) as client:
        options = {"continuous_usage_stats": True}
        parts = chunks(await streamed(client, prompt="abc", max_tokens=5, stream_options=options))
    told = [part["usage"]["completion_tokens"] for part in parts]
    assert told == sorted(told) and told[-1] == 5
    assert {part["usage"]["prompt_tokens"] for part in parts} == {3}
    # Details come with the usage of the whole answer only, as vLLM sends them.
    assert not any("prompt_tokens_details" in part["usage"] for part in parts)


@pytest.mark.parametrize("text", ['"\\\n\r\t', "\u00e9\u2028\U0001f600", "</script>\x00\x7f"])
async def test_any_text_stays_one_line_of_json(router: RouterService, text: str) -> None:
    length = len(text.encode())
    async with http_client(router) as client:
        parts = chunks(await streamed(client, prompt=text, max_tokens=length))
    assert texts(parts) == [text]


async def test_a_stop_string_ends_the_text_before_it(router: RouterService) -> None:
    async with http_client(router) as client:
        parts = chunks(await streamed(client, prompt="abcd", max_tokens=9, stop=["cd"]))
    assert texts(parts) == ["ab"]
    assert parts[-1]["choices"][0] | {} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "cd",
    }


async def test_an_error_before_the_first_text_has_its_own_status(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    async with http_client(router) as client:
        asking = asyncio.create_task(
            client.post(
                "/v1/completions",
                json={"prompt": "abc", "stream": True},
                headers={"x-request-id": "mine"},
            )
        )
        await until(lambda: verifier.live, 30.0)
        router.abort_requests(["mine"])  # type: ignore[list-item]
        answer = await asking
    assert answer.status_code == 499 and answer.json()["error"]["code"] == "aborted"
    assert answer.headers["x-request-id"] == "mine"


async def test_an_error_after_the_first_text_is_an_event_of_the_stream(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.002
    body = {"prompt": "abc", "stream": True, "max_tokens": 1000}
    async with http_client(router) as client:
        headers = {"x-request-id": "mine"}
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status_code == 200
            router.abort_requests(["mine"])  # type: ignore[list-item]
            text = (await answer.aread()).decode()
    *_, error, last = events(text)
    assert last == "[DONE]" and json.loads(error)["error"]["type"] == "cancelled_error"
    await assert_all_freed(router, verifier)


async def test_a_deadline_has_a_status_before_the_first_text_and_an_event_after_it(
    router: RouterService, verifier: FakeVerifier
) -> None:
    body = {"prompt": "abc", "max_tokens": 1000}
    async with http_client(router) as client:
        verifier.gate = asyncio.Event()
        for stream in (False, True):
            request = body | {"stream": stream, "timeout_s": 0.1}
            answer = await client.post("/v1/completions", json=request)
            error = answer.json()["error"]
            assert answer.status_code == 504
            assert (error["code"], error["type"]) == ("deadline", "timeout_error")
        verifier.gate = None
        verifier.round_s = 0.05
        request = body | {"stream": True, "timeout_s": 4.0}
        *_, error, last = events((await client.post("/v1/completions", json=request)).text)
        assert last == "[DONE]" and json.loads(error)["error"]["code"] == "deadline"
        refused = await client.post("/v1/completions", json=body | {"timeout_s": 0})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "timeout_s"
    await assert_all_freed(router, verifier)


async def test_many_streams_at_once_are_all_whole(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=STREAMS, kv_blocks=4096, tokens_per_round=3)
    limits = httpx.Limits(max_connections=None)
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        http_router(router) as url,
        httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, trust_env=False) as client,
    ):

        async def one(number: int) -> list[str]:
            return texts(chunks(await streamed(client, prompt=f"<{number}>", max_tokens=60)))

        answers = await asyncio.gather(*(one(number) for number in range(STREAMS)))
        await assert_all_freed(router, verifier)
    assert answers == [[(f"<{number}>" * 60)[:60]] for number in range(STREAMS)]


def narrow(address: str, *, slow_reader_timeout_s: float, shared: bool) -> socket.socket:
    """A listener whose connections hold little in the kernel."""
    listener = bind_socket(address, slow_reader_timeout_s=slow_reader_timeout_s, shared=shared)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


def deaf_to(address: str, body: dict[str, object]) -> socket.socket:
    """A client that asks and never reads."""
    host, port = address.removeprefix("http://").split(":")
    content = json.dumps(body)
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect((host, int(port)))
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    deaf.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
    return deaf


async def test_who_does_not_read_is_left_and_frees_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_router.api.http.server.bind_socket", narrow)
    verifier = FakeVerifier(max_context_len=1 << 16, kv_blocks=1 << 13, tokens_per_round=64)
    overload = OverloadConfig(slow_reader_timeout_s=0.5)
    async with (
        running_router(tmp_path, {"v": verifier}, overload=overload) as router,
        http_router(router) as url,
        httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client,
    ):
        with deaf_to(url, {"prompt": "abc", "max_tokens": 60_000, "stream": True, "n": 8}):
            await until(lambda: sample(router, "outrider_refusals_total", reason=SLOW), 100.0)
            await assert_all_freed(router, verifier)
            answer = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "abc"


def test_listeners_share_a_port_where_all_of_them_are_told_to() -> None:
    with bind_socket("127.0.0.1:0", slow_reader_timeout_s=1.0, shared=True) as first:
        address = f"127.0.0.1:{first.getsockname()[1]}"
        with bind_socket(address, slow_reader_timeout_s=1.0, shared=True):
            pass
        with pytest.raises(FailedPreconditionError) as caught:
            bind_socket(address, slow_reader_timeout_s=1.0)
    assert caught.value.reason == "ADDRESS_IN_USE"
