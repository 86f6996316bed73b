"""What POST /v1/responses does not support is refused by name, and garbage with a 400."""

from __future__ import annotations

import random
import string
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from outrider_router.api.http.responses.request_models import (
    CreateResponseRequest,
    ReasoningOptions,
    ResponseFunctionTool,
    ResponseTextOptions,
)
from outrider_router.api.http.unsupported_fields import (
    FUNCTION_TOOL,
    REASONING_ITEM,
    RESPONSE,
    RESPONSE_REASONING,
    RESPONSE_TEXT,
)
from outrider_router.requests.service import RouterService

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client
from tests.unit.router.api.http.responses.support import TOOL, URL, create, refusal

PAGE = (Path(__file__).parents[6] / "docs" / "openai-api.md").read_text()
SECTION = PAGE[PAGE.index("## Responses") :].partition("\n## ")[0]
REFUSED = [
    ({"input": [{"type": "item", "id": "a"}]}, "input[0]", "'item'"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0]", "'computer_call_output'"),
    ({"input": [{"role": "user", "content": "a"}, {"type": "mcp_call"}]}, "input[1]", "'mcp_call'"),
    ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]", "'web_search'"),
    ({"tools": [{"type": "file_search"}]}, "tools[0]", "must be functions"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]", "'mcp'"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools[0]", "'code_interpreter'"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0]", "'custom'"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "may be null or"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "two tools"),
    ({"tools": [{**TOOL, "name": "\u00e9"}]}, "tools[0].name", "1 to 64 letters"),
    ({"tools": [{**TOOL, "parameters": {"type": "nothing"}}], "tool_choice": "required"},
     "tools[0].parameters", "the JSON schema of an object"),
    ({"tools": [{**TOOL, "parameters": {"type": "object", "properties": {"a": {"type": "no"}}}}],
      "tool_choice": "required"}, "tools", "cannot be enforced"),
    ({"tools": [TOOL] * 1025}, "tools", "at most 1024"),
    ({"tool_choice": "sometimes"}, "tool_choice", "must be 'none', 'auto'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice",
     "'allowed_tools'"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "may be null or 'medium'"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "must be 'text'"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
     "text.format", "json_schema"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "may be null or 'auto'"),
    ({"reasoning": {"effort": "max"}}, "reasoning.effort", "must be 'none'"),
    ({"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
    ({"include": ["everything"]}, "include[0]", "must be"),
    ({"background": True, "stream": True}, "stream", "together with background"),
    ({"background": True, "store": False}, "store", "may not be false"),
    ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "at most 16"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512"),
    ({"metadata": {"a": 1}}, "metadata.a", "must be a string"),
    ({"metadata": {"a" * 65: "b"}}, f"metadata.{'a' * 65}", "at most 64 characters as keys"),
    ({"conversation": "conv_1"}, "conversation", "not supported"),
    ({"max_tool_calls": 3}, "max_tool_calls", "not supported"),
    ({"truncation": "auto"}, "truncation", "may be null or 'disabled'"),
    ({"top_logprobs": 2}, "top_logprobs", "may be null or 0"),
    ({"n": 2}, "n", "may be null or 1"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"previous_response_id": ""}, "previous_response_id", "at least 1 character"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set 'messages'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
     "input[0].content[0]", "'input_image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"},
                                             {"type": "input_file", "file_id": "a"}]}]},
     "input[0].content[1]", "'input_file'"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}]},
     "input[0].content[0]", "'refusal'"),
    ({"input": [{"type": "function_call_output", "call_id": "a",
                 "output": [{"type": "input_image"}]}]}, "input[0].output[0]", "'input_image'"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]},
     "input[0].output", "a string or a list of parts of type 'input_text'"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
     "input[0].arguments", "must be a JSON object"),
    ({"input": [{"type": "function_call", "call_id": str(n), "name": "f", "arguments": "{}"}
                for n in range(129)]}, "input[0]", "at most 128"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "a"}]},
     "input[0].encrypted_content", "may be null"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "of type 'input_text' or"),
    ({"input": 5}, "input", "a string or a list of items"),
    ({"input": []}, "input", "at least 1 entry"),
    ({"input": None}, "input", "must be"),
]  # fmt: skip


@pytest.fixture
async def client(tmp_path: Path, verifier: FakeVerifier) -> AsyncGenerator[httpx.AsyncClient]:
    config: dict[str, Any] = {"tool_call_parser": "hermes"}
    async with (
        running_router(tmp_path, {"v": verifier}, **config) as router,
        http_client(router) as connected,
    ):
        yield connected


async def test_what_is_not_supported_is_refused_by_name(client: httpx.AsyncClient) -> None:
    for fields, param, message in REFUSED:
        error = await refusal(client, **{"input": "a", **fields})
        assert error["param"] == param, error
        assert message in error["message"], error
        assert error["type"] == "invalid_request_error" and "~" not in error["message"]


async def test_every_refused_field_is_named_and_may_have_its_harmless_values(
    client: httpx.AsyncClient,
) -> None:
    function: dict[str, Any] = {**TOOL}
    for fields, where, wrap in (
        (RESPONSE, "", lambda name, value: {name: value}),
        (RESPONSE_TEXT, "text.", lambda name, value: {"text": {name: value}}),
        (RESPONSE_REASONING, "reasoning.", lambda name, value: {"reasoning": {name: value}}),
        (FUNCTION_TOOL, "tools[0].", lambda name, value: {"tools": [{**function, name: value}]}),
    ):
        for name, harmless in fields.items():
            error = await refusal(client, **{"input": "a", **wrap(name, {"un": "known"})})
            assert error["param"] == f"{where}{name}" and error["code"] == "unsupported"
            for value in (None, *harmless):
                await create(client, **{"input": "a", "max_output_tokens": 1, **wrap(name, value)})


async def test_harmless_fields_of_clients_are_accepted(client: httpx.AsyncClient) -> None:
    await create(
        client,
        input="a",
        max_output_tokens=1,
        user="me",
        safety_identifier="x",
        prompt_cache_key="y",
        prompt_cache_retention="24h",
        service_tier="flex",
        include=["reasoning.encrypted_content", "file_search_call.results"],
        stream_options={"include_obfuscation": True},
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "medium", "format": {"type": "text"}},
        unheard_of=[1, 2],
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=["x"],
        chat_template_kwargs={"enable_thinking": False},
        timeout_s=20,
    )


async def test_a_thousand_items_are_taken_and_too_many_are_not(client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": ""}] * 50
    await create(client, input=items, max_output_tokens=1)
    error = await refusal(client, input=items * 20)
    assert error["code"] == "context_length_exceeded"
    error = await refusal(client, input=items * 100)
    assert error["param"] == "input" and "at most 4096 entries" in error["message"]


async def test_garbage_is_a_400_or_404(client: httpx.AsyncClient) -> None:
    """Random values in random fields, and the router serves on."""
    chance = random.Random(5)
    fields = [*CreateResponseRequest.model_fields, *RESPONSE]
    values: list[Any] = [
        None, True, -1, 0, 1.5, 10**30, "", "a", "x" * 300, [], [None], [{}], {}, {"type": "a"},
        {"type": None}, {"type": "function"}, [[]], [{"type": "message"}], {"format": []},
        [{"type": "function", "name": "f", "parameters": []}], [{"role": "user", "content": "a"}],
        [{"id": "a"}], [{"type": "reasoning", "content": [{}]}], "".join(map(chr, range(40))),
    ]  # fmt: skip
    statuses = set()
    for _ in range(300):
        body = {chance.choice(fields): chance.choice(values) for _ in range(chance.randint(1, 3))}
        body = {"input": "a", "max_output_tokens": 2, **body, "background": False}
        answer = await client.post(URL, json=body)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 504), (body, answer.text)
    assert {200, 400} <= statuses
    for response_id in ("x", "%00", "a" * 5000, "..%2f..", "resp_" + string.printable[:20]):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = await client.request(method, f"{URL}/{response_id}{path}")
            assert answer.status_code in (404, 405)
            assert len(answer.text) < 2500
    await create(client, input="a", max_output_tokens=1)


def test_the_page_names_every_field() -> None:
    models = (CreateResponseRequest, ReasoningOptions, ResponseTextOptions, ResponseFunctionTool)
    tables = (RESPONSE, RESPONSE_TEXT, RESPONSE_REASONING, FUNCTION_TOOL, REASONING_ITEM)
    named = {name for model in models for name in model.model_fields}
    named |= {name for table in tables for name in table}
    assert not [name for name in sorted(named) if f"`{name}`" not in SECTION]
    assert not set(CreateResponseRequest.model_fields) & set(RESPONSE)


async def test_the_router_serves_on(router: RouterService) -> None:
    """Bodies that are no objects."""
    async with http_client(router) as client:
        for content in (b"", b"[]", b"5", b"{", b'{"input": "\xff"}', b"[" * 10_000):
            answer = await client.post(
                URL, content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, answer.text
