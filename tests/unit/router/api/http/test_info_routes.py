"""What operators and tools ask for: health, version, metrics, tokens; ids, bounds, tenants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider_router.api.http import HttpServer, request_models
from outrider_router.base.tenants import TenantLimits, TenantSource
from outrider_router.config import OverloadConfig
from outrider_router.requests.service import RouterService

import outrider
from outrider.errors import FailedPreconditionError
from outrider.ids import RequestId
from outrider.spans import NO_SPAN, RequestSpan
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client, http_router, set_http_options
from tests.waiting import until


async def test_health_follows_the_verifiers(router: RouterService, verifier: FakeVerifier) -> None:
    async with http_client(router) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        verifier.lost.set()
        await until(lambda: not router.readiness.is_ready)
        answer = await client.get("/ping")
        assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})
        assert (await client.get("/v1/models")).json()["data"] == []
        verifier.restart()
        await until(lambda: router.readiness.is_ready)
        assert (await client.get("/ping")).status_code == 200


async def test_a_router_that_drains_ends_what_runs_and_takes_no_more(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    async with http_client(router) as client:
        running = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        )
        await until(lambda: verifier.live)
        draining = asyncio.create_task(router.drain(60.0))
        await until(lambda: not router.readiness.is_ready)
        assert (await client.get("/health")).status_code == 503
        refused = await client.post("/v1/completions", json={"prompt": "abc"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutdown"
        assert refused.headers["retry-after"] == "1"
        verifier.gate.set()
        assert (await running).json()["choices"][0]["text"] == "abca"
        assert await draining


async def test_version_and_metrics_are_those_of_the_router(router: RouterService) -> None:
    async with http_client(router) as client:
        assert (await client.get("/version")).json() == {"version": outrider.__version__}
        await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        told = await client.get("/metrics")
        assert told.headers["content-type"].startswith("text/plain")
        assert 'outrider_requests_total{outcome="length"} 1.0' in told.text
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        told = await client.get("/metrics", headers=accept)
        assert told.headers["content-type"].startswith("application/openmetrics-text")
        assert told.text.endswith("# EOF\n")


async def test_the_status_page_is_at_the_root_and_not_in_the_openapi(router: RouterService) -> None:
    async with http_client(router) as client:
        page = await client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert (await client.get("/status.json")).headers["content-type"] == "application/json"
        assert "/status.json" not in (await client.get("/openapi.json")).json()["paths"]


async def test_the_clients_trace_is_taken_up(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def begin(_request_id: RequestId, traceparent: str) -> RequestSpan:
        heard.append(traceparent)
        return NO_SPAN

    monkeypatch.setattr("outrider_router.requests.intake.request_span", begin)
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    async with http_client(router) as client:
        await client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        await client.post("/v1/completions", json={"prompt": "a"})
    assert heard == [headers["traceparent"], ""]


async def test_texts_become_tokens_and_tokens_texts(router: RouterService) -> None:
    async with http_client(router) as client:
        told = (await client.post("/tokenize", json={"prompt": "h\u00e9"})).json()
        assert told["tokens"] == list(router.tokenizer.encode("h\u00e9")) and told["count"] == 3
        assert told["max_model_len"] == 2048
        back = await client.post("/detokenize", json={"tokens": told["tokens"]})
        assert back.json() == {"prompt": "h\u00e9"}
        turns = [{"role": "user", "content": "hi"}]
        chat = (await client.post("/tokenize", json={"messages": turns})).json()
        assert chat["tokens"] == list(router.tokenizer.encode_chat(turns))
        back = await client.post("/detokenize", json={"tokens": chat["tokens"]})
        assert back.json()["prompt"].startswith("<|im_start|>user\nhi<|im_end|>")
        named = await client.post("/tokenize", json={"prompt": "a", "return_token_strs": True})
        assert named.json()["token_strs"] == ["a"]
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []


async def test_tools_and_variables_of_the_template_become_tokens(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{{ mood }} {% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    )
    async with (
        running_router(tmp_path, {"v": FakeVerifier()}) as router,
        http_client(router) as client,
    ):
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "chat_template_kwargs": {"mood": "fine"},
        }
        told = (await client.post("/tokenize", json=body)).json()
        assert told["tokens"] == list(router.tokenizer.encode("fine look"))


async def test_long_texts_hold_nobody_up_and_too_long_ones_are_refused(
    router: RouterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args, **options)

        return noted

    for name in ("encode", "decode"):
        monkeypatch.setattr(router.tokenizer, name, noting(getattr(router.tokenizer, name)))
    most = request_models.MAX_TOKENIZED_CHARS
    async with http_client(router) as client:
        text = "a" * 30_000
        ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert len(ids) == len(text)
        back = await client.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": text}
        assert len(threads) == 2 and threading.main_thread().name not in threads
        turn = {"role": "user", "content": "a" * (most // 2 + 1)}
        for path, body in (
            ("/tokenize", {"prompt": "a" * (most + 1)}),
            ("/tokenize", {"messages": [turn, turn]}),
            ("/detokenize", {"tokens": [97] * (request_models.MAX_DETOKENIZED_IDS + 1)}),
        ):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400 and "at most" in refused.text, refused.text
        assert len(threads) == 2


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [259]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
        ("/v1/completions", {"prompt": [259]}, 400),
        ("/v1/completions", [], 400),
        ("/v1/completions", {"prompt": "abc", "n": 129}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/nothing", {}, 404),
        ("/health", {}, 405),
    ],
)
async def test_refusals_are_in_openais_form(
    router: RouterService, path: str, body: object, status: int
) -> None:
    async with http_client(router) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"prompt": NaN}', b"\xff", b"[" * 100_000, b"1" * 10_000, b'"\\ud800"']
)
async def test_bodies_that_are_no_json_are_refused(router: RouterService, content: bytes) -> None:
    async with http_client(router) as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "x" * 5000])
async def test_json_that_is_said_to_be_something_else_is_told_so(
    router: RouterService, kind: str
) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    async with http_client(router) as client:
        answer = await client.post("/v1/completions", content=body, headers={"content-type": kind})
        bare = await client.post("/v1/completions", content=body)
        vendors = {"content-type": "application/vnd.api+json; charset=utf-8"}
        taken = await client.post("/v1/completions", content=body, headers=vendors)
    for refused in (answer, bare):
        assert refused.status_code == 415
        error = refused.json()["error"]
        assert error["code"] == "unsupported_media_type" and len(error["message"]) < 200
        assert error["message"].startswith("Content-Type must be application/json, got '")
    assert taken.status_code == 200


async def test_a_body_beyond_the_bound_is_refused_however_it_is_sent(
    router: RouterService,
) -> None:
    set_http_options(router, max_body_bytes=1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()
    headers = {"content-type": "application/json"}

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with http_client(router) as client:
        for content in (body, in_pieces()):
            answer = await client.post("/v1/completions", content=content, headers=headers)
            assert answer.status_code == 413, answer.text
            assert "larger than" in answer.json()["error"]["message"]


async def test_every_answer_names_its_request(
    router: RouterService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = {"prompt": "abc", "max_tokens": 2}
    async with http_client(router) as client:
        named = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == "mine" and named.json()["id"] == "cmpl-mine"
        made = await client.post("/v1/completions", json=body)
        own = made.headers["x-request-id"]
        assert own.startswith("req-") and made.json()["id"] == f"cmpl-{own}"
        for bad in ("x" * 300, "two words", "\x7f"):
            answer = await client.get("/version", headers={"x-request-id": bad})
            assert answer.headers["x-request-id"].startswith("req-")
    ended = [r.__dict__["request_id"] for r in caplog.records if r.message == "request ended"]
    assert ended == ["mine", own]


async def test_an_id_that_runs_already_is_a_conflict(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    headers = {"x-request-id": "mine"}
    async with http_client(router) as client:
        body = {"prompt": "abc", "max_tokens": 2}
        first = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await until(lambda: verifier.live)
        second = await client.post("/v1/completions", json=body, headers=headers)
        assert second.status_code == 409 and second.json()["error"]["code"] == "request_exists"
        verifier.gate.set()
        assert (await first).status_code == 200


async def test_the_tenant_is_told_by_a_header_and_bounded_as_over_grpc(tmp_path: Path) -> None:
    settings = {
        "overload": OverloadConfig(tenant_from=TenantSource.METADATA),
        "tenants": {"slow": TenantLimits(requests_per_s=0.05)},
    }
    body = {"prompt": "abc", "max_tokens": 2}
    async with (
        running_router(tmp_path, {"v": FakeVerifier()}, **settings) as router,
        http_client(router) as client,
    ):

        async def ask(tenant: str) -> httpx.Response:
            headers = {"x-outrider-tenant": tenant}
            return await client.post("/v1/completions", json=body, headers=headers)

        assert (await ask("slow")).status_code == (await ask("fast")).status_code == 200
        refused = await ask("slow")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert (await ask("x" * 100)).status_code == 400
        assert sample(router, "outrider_tenant_requests_total", tenant="slow") == 1


async def test_an_address_that_is_taken_or_none_is_a_typed_error(router: RouterService) -> None:
    async with http_router(router) as url:
        with pytest.raises(FailedPreconditionError, match="cannot listen"):
            await HttpServer(url.removeprefix("http://"), router).start()
    for address in ("127.0.0.1:x", "127.0.0.1:70000", "nowhere"):
        with pytest.raises(FailedPreconditionError, match="cannot listen"):
            await HttpServer(address, router).start()


async def test_of_too_many_biases_one_mistake_is_told(router: RouterService) -> None:
    async with http_client(router) as client:
        body = {"prompt": "a", "logit_bias": {f"x{i}": "no" for i in range(5000)}}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "at most 1024 entries, has 5000" in answer.text
    assert len(answer.text) < 1000


# ---- conversations as tokens -------------------------------------------------------------------

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "So <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": True}, "So <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False, "add_special_tokens": False}, "So <|im_end|>\n"),
        ({"continue_final_message": True}, "So "),
        ({"continue_final_message": True, "add_generation_prompt": False}, "So "),
        ({"continue_final_message": False, "tools": [], "chat_template_kwargs": {}}, "assistant\n"),
    ],
)
async def test_a_conversation_ends_where_its_options_say(
    router: RouterService, options: dict[str, object], end: str
) -> None:
    async with http_client(router) as client:
        told = (await client.post("/tokenize", json={"messages": TURNS, **options})).json()
        back = await client.post("/detokenize", json={"tokens": told["tokens"]})
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert back.json()["prompt"].startswith(begin) and back.json()["prompt"].endswith(end)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"documents": [{"text": "a"}]}, "documents"),
        (
            {"tools": [{"type": "function", "function": {"name": "f g"}}]},
            "tools[0].function.name",
        ),
        ({"add_special_tokens": True}, "add_special_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    ],
)
async def test_what_a_conversation_cannot_be_tokenized_with_is_refused_by_name(
    router: RouterService, options: dict[str, object], param: str
) -> None:
    async with http_client(router) as client:
        refused = await client.post("/tokenize", json={"messages": TURNS, **options})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
