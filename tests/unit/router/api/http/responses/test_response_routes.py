"""POST /v1/responses and the routes of stored responses, on a scripted verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider_router.base.tenants import TenantSource
from outrider_router.config import OverloadConfig
from outrider_router.requests.service import RouterService

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client, set_http_options
from tests.unit.router.api.http.responses.support import (
    CALL,
    ITEM,
    TOOL,
    URL,
    check_response,
    create,
    join_events,
    prompt,
    read_stream,
    refusal,
    script,
    turn,
)
from tests.unit.router.helpers import assert_all_freed
from tests.waiting import until


@pytest.fixture
async def router(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    parsers: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running_router(tmp_path, {"v": verifier}, **parsers) as service:
        yield service


@pytest.fixture
async def client(router: RouterService) -> AsyncGenerator[httpx.AsyncClient]:
    async with http_client(router) as connected:
        yield connected


async def retrieve(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    answer = await client.get(f"{URL}/{response_id}")
    assert answer.status_code == 200, answer.text
    return check_response(answer.json())


async def ended(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    """A response in the background once it has ended."""
    while True:
        body = await retrieve(client, response_id)
        if body["status"] not in ("queued", "in_progress"):
            return body
        await asyncio.sleep(0.01)


async def test_a_response_is_whole_or_streamed_and_stored(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = script(router, f"<think>\nHm.\n</think>\n\nI ask.\n{CALL}")
    asked = {"input": "hello", "tools": [TOOL], "metadata": {"a": "b"}, "temperature": 0.5}
    whole = await create(client, **asked)
    streamed = await client.post(URL, json={**asked, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = read_stream(streamed.text)
    last = events[-1]["response"]
    assert join_events(events) == last["output"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    for body in (whole, last):
        assert await retrieve(client, body["id"]) == body
        reasoning, message, call = body["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "I ask."
        assert (call["name"], call["arguments"]) == ("f", '{"a": 1}')
        assert body["status"] == "completed" and body["usage"]["output_tokens"] > 10
        assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert body["tools"] == [TOOL] and body["metadata"] == {"a": "b"}
    await assert_all_freed(router, verifier)


async def test_a_conversation_continues_without_its_instructions(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = script(router, "one", "two", "three")
    first = await create(client, input="a", instructions="Be brief.")
    system = turn("system", "Be brief.")
    assert prompt(router, verifier).startswith(system + turn("user", "a"))
    second = await create(client, input="b", previous_response_id=first["id"])
    history = turn("user", "a") + turn("assistant", "one") + turn("user", "b")
    assert prompt(router, verifier) == f"{history}<|im_start|>assistant\n"
    # A stored response stays continuable after the one before it is gone.
    assert (await client.delete(f"{URL}/{first['id']}")).json()["deleted"] is True
    await create(client, input="c", instructions="Shout.", previous_response_id=second["id"])
    history = turn("system", "Shout.") + history + turn("assistant", "two") + turn("user", "c")
    assert prompt(router, verifier) == f"{history}<|im_start|>assistant\n"


async def test_a_call_is_answered_in_the_next_response(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = script(router, CALL, "It is 4.")
    first = await create(client, input="2 + 2?", tools=[TOOL], tool_choice="required")
    assert verifier.specs[-1].structured_output is not None
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
    second = await create(client, input=[output], tools=[TOOL], previous_response_id=first["id"])
    assert turn("tool", "4") in prompt(router, verifier)
    # The same conversation with all items in the input, and with references to stored ones.
    for item in (call, {"type": "item_reference", "id": call["id"]}):
        question = {"role": "user", "content": "2 + 2?"}
        verifier.script = script(router, "It is 4.")
        third = await create(client, input=[question, item, output], tools=[TOOL], store=False)
        assert verifier.specs[-1].token_ids == verifier.specs[1].token_ids
        assert [item["content"] for item in third["output"]] == [
            item["content"] for item in second["output"]
        ]
        answer = await client.get(f"{URL}/{third['id']}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize(
    ("choice", "is_enforced"),
    [
        ("auto", False),
        ("none", False),
        ("required", True),
        ({"type": "function", "name": "f"}, True),
    ],
)
async def test_a_tool_choice_is_enforced(
    client: httpx.AsyncClient, verifier: FakeVerifier, choice: object, is_enforced: bool
) -> None:
    body = await create(client, input="a", tools=[TOOL], tool_choice=choice, max_output_tokens=3)
    assert body["tool_choice"] == choice
    assert (verifier.specs[-1].structured_output is not None) is is_enforced


async def test_a_text_format_is_a_structured_output(
    client: httpx.AsyncClient, verifier: FakeVerifier
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    formats: list[tuple[dict[str, Any], bool]] = [
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        (format_, True),
    ]
    for wanted, is_enforced in formats:
        body = await create(
            client, input="a", text={"format": wanted}, reasoning={"effort": "none"},
            max_output_tokens=3,
        )  # fmt: skip
        assert body["text"]["format"].items() >= wanted.items()
        assert (verifier.specs[-1].structured_output is not None) is is_enforced


async def test_input_items_are_listed_by_pages(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = script(router, f"<think>\nHm.\n</think>\n\n{CALL}", "4")
    first = await create(client, input="a", tools=[TOOL], instructions="b")
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"]}
    parts = [{"type": "input_text", "text": "4"}]
    second = await create(
        client, input=[{**output, "output": parts}], previous_response_id=first["id"]
    )
    url = f"{URL}/{second['id']}/input_items"
    whole = (await client.get(url, params={"order": "asc"})).json()
    types = ["message", "reasoning", "function_call", "function_call_output"]
    assert [item["type"] for item in whole["data"]] == types and not whole["has_more"]
    for item in whole["data"]:
        ITEM.validate_python(item, strict=True)
    assert whole["data"][1:3] == first["output"] and whole["data"][3]["output"] == parts
    assert (await client.get(url)).json()["data"] == whole["data"][::-1]
    found: list[object] = []
    after: dict[str, str] = {}
    while True:
        page = (await client.get(url, params={"order": "asc", "limit": 3, **after})).json()
        found += page["data"]
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], found[-1]["id"])  # type: ignore[index]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert found == whole["data"]
    for params, field in (
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ):
        answer = await client.get(url, params=params)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_an_error_before_the_first_output_has_its_own_status(
    client: httpx.AsyncClient,
) -> None:
    for stream in (False, True):
        long = await refusal(client, input="a" * 3000, stream=stream)
        assert (long["param"], long["code"]) == ("input", "context_length_exceeded")
        many = await refusal(client, input="a", max_output_tokens=10**4, stream=stream)
        assert many["param"] == "max_output_tokens"
        other = await refusal(client, 404, input="a", model="other", stream=stream)
        assert other["code"] == "model_not_found"


async def test_an_error_after_the_first_output_fails_the_response(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.002
    body = {"input": "abc", "stream": True, "max_output_tokens": 1000}
    headers = {"x-request-id": "mine"}
    async with client.stream("POST", URL, json=body, headers=headers) as answer:
        assert answer.status_code == 200
        router.abort_requests(["mine"])  # type: ignore[list-item]
        events = read_stream((await answer.aread()).decode())
    error, last = events[-2:]
    assert (error["type"], error["code"]) == ("error", "aborted")
    assert last["type"] == "response.failed"
    failed = last["response"]
    assert join_events(events)[0]["id"] == failed["output"][0]["id"]
    assert await retrieve(client, failed["id"]) == failed
    refused = await refusal(client, input="a", previous_response_id=failed["id"])
    assert refused["code"] == "previous_response_not_completed" and "failed" in refused["message"]
    await assert_all_freed(router, verifier)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_response(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier, stream: bool
) -> None:
    verifier.round_s = 0.01
    body = {"input": "abc", "stream": stream, "max_output_tokens": 1500}
    asking = asyncio.create_task(client.post(URL, json=body))
    await until(lambda: verifier.live, 30.0)
    asking.cancel()
    await until(lambda: not verifier.live, 30.0)
    await assert_all_freed(router, verifier)


async def test_a_response_in_the_background_goes_on_without_its_client(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = script(router, "done")
    verifier.gate = asyncio.Event()
    begun = await create(client, input="a", background=True)
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    await until(lambda: verifier.live, 30.0)
    assert (await retrieve(client, begun["id"]))["status"] in ("queued", "in_progress")
    url = f"{URL}/{begun['id']}"
    assert len((await client.get(f"{url}/input_items")).json()["data"]) == 1
    early = await refusal(client, input="b", previous_response_id=begun["id"])
    assert early["code"] == "previous_response_not_completed"
    verifier.gate.set()
    body = await ended(client, begun["id"])
    assert body["status"] == "completed" and body["output"][0]["content"][0]["text"] == "done"
    # Cancelling one that has ended changes nothing.
    assert (await client.post(f"{url}/cancel")).json() == body
    assert (await create(client, input="b", previous_response_id=begun["id"]))["output"]
    assert turn("assistant", "done") in prompt(router, verifier)


async def test_a_response_in_the_background_is_cancelled_once(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.005
    for wait in (False, True):
        begun = await create(client, input="abc", background=True, max_output_tokens=1500)
        if wait:
            await until(lambda: verifier.live, 30.0)
        url = f"{URL}/{begun['id']}"
        body = check_response((await client.post(f"{url}/cancel")).json())
        assert body["status"] == "cancelled"
        assert (await client.post(f"{url}/cancel")).json() == body
        assert await retrieve(client, begun["id"]) == body
        await assert_all_freed(router, verifier)


async def test_a_response_in_the_background_is_deleted(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    begun = await create(client, input="abc", background=True)
    await until(lambda: verifier.live, 30.0)
    url = f"{URL}/{begun['id']}"
    assert (await client.delete(url)).status_code == 200
    await assert_all_freed(router, verifier)
    for answer in (await client.get(url), await client.delete(url)):
        assert answer.status_code == 404


async def test_an_error_in_the_background_is_in_the_response(client: httpx.AsyncClient) -> None:
    begun = await create(client, input="a" * 3000, background=True)
    failed = await ended(client, begun["id"])
    assert failed["status"] == "failed" and failed["error"]["code"] == "invalid_prompt"
    assert "context" in failed["error"]["message"]


async def test_a_foreground_response_cannot_be_cancelled(client: httpx.AsyncClient) -> None:
    body = await create(client, input="a", max_output_tokens=3)
    answer = await client.post(f"{URL}/{body['id']}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_background")


async def test_only_so_many_responses_run_in_the_background(
    router: RouterService, verifier: FakeVerifier
) -> None:
    set_http_options(router, max_background_responses=2)
    verifier.gate = asyncio.Event()
    async with http_client(router) as client:
        asked = {"input": "a", "background": True, "max_output_tokens": 2}
        begun = [await create(client, **asked) for _ in range(2)]
        answer = await client.post(URL, json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "background_full")
        assert answer.headers["retry-after"] == "1"
        verifier.gate.set()
        for each in begun:
            assert (await ended(client, each["id"]))["status"] == "incomplete"
        await create(client, input="a", background=True)


async def test_a_router_that_drains_waits_for_the_background(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    begun = await create(client, input="a", background=True, max_output_tokens=3)
    await until(lambda: verifier.live, 30.0)
    draining = asyncio.create_task(router.drain(60.0))
    await asyncio.sleep(0.1)
    refused = await refusal(client, 503, input="a", background=True)
    assert refused["code"] == "shutdown" and not draining.done()
    verifier.gate.set()
    assert await draining
    assert (await ended(client, begun["id"]))["status"] == "incomplete"


async def test_a_router_that_stops_fails_the_background(
    client: httpx.AsyncClient, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.gate = asyncio.Event()
    begun = await create(client, input="a", background=True)
    await until(lambda: verifier.live, 30.0)
    await router.close()
    failed = await ended(client, begun["id"])
    assert failed["status"] == "failed" and "shutting down" in failed["error"]["message"]


async def test_responses_of_other_tenants_do_not_exist(
    tmp_path: Path, verifier: FakeVerifier
) -> None:
    overload = OverloadConfig(tenant_from=TenantSource.METADATA)
    async with (
        running_router(tmp_path, {"v": verifier}, overload=overload) as router,
        http_client(router) as client,
    ):
        client.headers["x-outrider-tenant"] = "alice"
        done = await create(client, input="a", max_output_tokens=3)
        verifier.gate = asyncio.Event()
        running = await create(client, input="a", background=True)
        client.headers["x-outrider-tenant"] = "bob"
        for body in (done, running):
            url = f"{URL}/{body['id']}"
            for answer in (
                await client.get(url),
                await client.delete(url),
                await client.post(f"{url}/cancel"),
                await client.get(f"{url}/input_items"),
                await client.post(URL, json={"input": "a", "previous_response_id": body["id"]}),
                await client.post(URL, json={"input": [{"id": done["output"][0]["id"]}]}),
            ):
                assert answer.status_code == 404, answer.text
        client.headers["x-outrider-tenant"] = "alice"
        for body in (done, running):
            assert (await client.delete(f"{URL}/{body['id']}")).status_code == 200


async def test_a_router_without_a_store_says_so(
    router: RouterService, verifier: FakeVerifier
) -> None:
    set_http_options(router, max_stored_responses=0)
    async with http_client(router) as client:
        body = await create(client, input="a", max_output_tokens=3)
        assert body["store"] is False
        await create(client, input="a", max_output_tokens=3, store=False, background=False)
        assert (await client.get(f"{URL}/{body['id']}")).status_code == 404
        for field, value in (
            ("store", True),
            ("background", True),
            ("previous_response_id", body["id"]),
        ):
            refused = await refusal(client, input="a", **{field: value})
            assert (refused["param"], refused["code"]) == (field, "response_store_off")
        refused = await refusal(client, input=[{"type": "item_reference", "id": "msg_1"}])
        assert (refused["param"], refused["code"]) == ("input[0].id", "response_store_off")


async def test_a_conversation_that_was_dropped_is_not_found(
    router: RouterService, verifier: FakeVerifier
) -> None:
    set_http_options(router, max_stored_responses=2)
    async with http_client(router) as client:
        ids = [(await create(client, input="a", max_output_tokens=3))["id"] for _ in range(3)]
        error = await refusal(client, 404, input="b", previous_response_id=ids[0])
        assert (error["param"], error["code"]) == (
            "previous_response_id",
            "previous_response_not_found",
        )
        for response_id in ids[1:]:
            await create(client, input="b", previous_response_id=response_id, store=False)


async def test_a_conversation_may_not_grow_without_end(client: httpx.AsyncClient) -> None:
    many = [{"type": "reasoning", "summary": []}] * 4096
    first = await create(client, input=many, max_output_tokens=3)
    error = await refusal(client, input="b", previous_response_id=first["id"])
    assert error["param"] == "previous_response_id" and "4096 items" in error["message"]
