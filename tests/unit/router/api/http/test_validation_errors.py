"""What is wrong with a request is said in plain words, and `param` is the field to blame."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from outrider_router.requests.service import RouterService

from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import http_client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
INTERNALS = re.compile(r"\.list\.|\.text\b|\.texts\.|dict\[|constrained|~|NoExtension|Input should")
ASKED: dict[str, object] = {"role": "user", "content": "Hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}


def called(arguments: str) -> dict[str, object]:
    """A message of the assistant with a call."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tools(*names: str, **fields: object) -> dict[str, object]:
    """The fields of a request with tools."""
    functions = [{"type": "function", "function": {"name": name}} for name in names]
    return {"messages": [ASKED], "tools": functions, **fields}


def turns(*messages: object) -> dict[str, object]:
    return {"messages": list(messages)}


def prompt(**fields: object) -> dict[str, object]:
    return {"prompt": "a", **fields}


BODIES: list[tuple[str, object, str, str]] = [
    (CHAT, turns({"role": "user", "content": [{"type": "image_url"}]}),
     "messages[0].content[0].type", "must be 'text', got \"image_url\""),
    (CHAT, turns({"role": "user", "content": 5}), "messages[0].content",
     "must be a string or a list of parts of type 'text', got 5"),
    (CHAT, turns(CALLS | {"tool_calls": None}), "messages[0].content", "may be null only"),
    (CHAT, turns(ASKED | {"content": None}), "messages[0].content", "may be null only"),
    (CHAT, turns(ASKED, CALLS), "messages[1].tool_calls[0].function", "is required"),
    (CHAT, turns(ASKED, called("{")), "messages[1].tool_calls[0].function.arguments",
     "must be a JSON object"),
    (CHAT, turns(ASKED, called("[1]")), "messages[1].tool_calls[0].function.arguments",
     "must be a JSON object, got '[1]'"),
    (CHAT, turns(ASKED, called("[" * 10_000)), "messages[1].tool_calls[0].function.arguments",
     "may be nested at most 64 levels deep"),
    (CHAT, turns(ASKED | {"tool_call_id": "a"}), "messages[0].tool_call_id", "of the role tool"),
    (CHAT, turns(called("{}") | {"role": "user", "content": "a"}), "messages[0].tool_calls",
     "only messages of the assistant"),
    (CHAT, tools("f"), "tools", "cannot be used with this model"),
    (CHAT, tools("f", "f"), "tools[1].function.name", "two tools have the name 'f'"),
    (CHAT, tools("é"), "tools[0].function.name", "must have 1 to 64 letters"),
    (CHAT, tools(*(f"f{n}" for n in range(1025))), "tools", "must have at most 1024"),
    (CHAT, tools(tool_choice="required"), "tool_choice", "there are no tools"),
    (CHAT, tools("f", tool_choice="sometimes"), "tool_choice", "must be 'none', 'auto'"),
    (CHAT, tools("f", tool_choice=5), "tool_choice",
     "must be 'none', 'auto', 'required' or an object that names a function, got 5"),
    (CHAT, tools("f", tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice",
     "names 'g', which is no tool"),
    (CHAT, turns(ASKED) | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs",
     "cannot set 'messages'"),
    (CHAT, turns(ASKED) | {"chat_template_kwargs": {"a": "b" * 70_000}}, "chat_template_kwargs",
     "must have at most 65536 bytes"),
    (CHAT, turns(ASKED) | {"reasoning_effort": "huge"}, "reasoning_effort", "must be 'none'"),
    (CHAT, turns(ASKED) | {"thinking_token_budget": -1}, "thinking_token_budget",
     "greater than or equal to 0, got -1"),
    (CHAT, turns(ASKED) | {"thinking_token_budget": 2**24 + 1}, "thinking_token_budget",
     "less than or equal to 16777216"),
    (CHAT, turns(ASKED) | {"thinking_token_budget": "5"}, "thinking_token_budget", "must be"),
    (CHAT, turns(ASKED) | {"thinking_token_budget": True}, "thinking_token_budget", "must be"),
    (CHAT, turns(ASKED) | {"thinking_token_budget": 5}, "thinking_token_budget",
     "no known format of reasoning"),
    (COMPLETIONS, prompt(prompt="a", thinking_token_budget=5), "thinking_token_budget",
     "is not supported here"),
    (CHAT, turns(ASKED, {"role": "function", "name": "f", "content": "b"}), "messages[1].role",
     "has the role 'tool'"),
    (CHAT, turns({"role": "wizard", "content": "b"}), "messages[0].role", "must be 'system'"),
    (CHAT, turns(), "messages", "must have at least 1 entry"),
    (CHAT, {}, "messages", "is required"),
    (CHAT, turns(ASKED) | {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, turns(ASKED) | {"max_completion_tokens": 10**5}, "max_completion_tokens", "context"),
    (CHAT, turns(ASKED) | {"max_tokens": 10**5}, "max_tokens", "context"),
    (CHAT, turns({"role": "user", "content": "a" * 3000}), "messages", "context"),
    (CHAT, turns({"role": "user", "content": "a" * 300_000}), "messages", "context"),
    (COMPLETIONS, prompt(prompt="a" * 300_000), "prompt", "context"),
    (COMPLETIONS, {"prompt": 5}, "prompt",
     "must be a string, a list of strings, a list of token ids, or a list of such lists, got 5"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt[1]", "must be a string, got 5"),
    (COMPLETIONS, {"prompt": [[1], ["a"]]}, "prompt[1][0]", "must be an integer, got \"a\""),
    (COMPLETIONS, {"prompt": [10**5]}, "prompt", "ids must be in [0, 259)"),
    (COMPLETIONS, prompt(n=128, prompt=["a", "b"]), "n", "256 answers"),
    (COMPLETIONS, prompt(stop=5), "stop", "must be a string or a list of strings, got 5"),
    (COMPLETIONS, prompt(stop=["a", 5]), "stop[1]", "must be a string, got 5"),
    (COMPLETIONS, prompt(stop=["é" * 1000]), "stop[0]", "at most 1024 bytes"),
    (COMPLETIONS, prompt(temperature="hot"), "temperature", "must be a number, got \"hot\""),
    (COMPLETIONS, prompt(seed=1.5), "seed", "must be an integer, got 1.5"),
    (COMPLETIONS, prompt(rule="best"), "rule", "must be 'greedy'"),
    (COMPLETIONS, prompt(model="other"), "model", "not served here"),
    (COMPLETIONS, prompt(stream_options=5), "stream_options", "must be an object, got 5"),
    (COMPLETIONS, prompt(logit_bias={"x": 5}), "logit_bias.x", "must have token ids as keys"),
    (COMPLETIONS, prompt(logit_bias={"5": 500}), "logit_bias.5", "less than or equal to 100"),
    (COMPLETIONS, prompt(logit_bias={"500": 5}), "logit_bias", "ids must be in [0, 259)"),
    (COMPLETIONS, prompt(stop_token_ids=[300]), "stop_token_ids", "ids must be in [0, 259)"),
    (COMPLETIONS, prompt(bad_words=[1]), "bad_words[0]", "must be a string, got 1"),
    (COMPLETIONS, prompt(min_tokens=9, max_tokens=4), "min_tokens", "greater than max_tokens"),
    (COMPLETIONS, prompt(guided_json=5), "guided_json", "must be an object, or a string"),
    (COMPLETIONS, prompt(guided_regex="("), "guided_regex", "unclosed group"),
    (COMPLETIONS, prompt(guided_regex="[^\\s\\S]"), "guided_regex", "no text fits it"),
    (COMPLETIONS, prompt(response_format={"type": "json_schema"}), "response_format", "schema"),
    (COMPLETIONS, prompt(response_format={"type": "xml"}), "response_format.type",
     "must be 'text', 'json_object' or 'json_schema', got \"xml\""),
    (COMPLETIONS, prompt(structured_outputs={"choice": [5]}), "structured_outputs.choice[0]",
     "must be a string, got 5"),
    (COMPLETIONS, prompt(best_of=3), "best_of", "is not supported here"),
    (COMPLETIONS, prompt(guided_regex=""), "guided_regex", "must have at least 1 character"),
    ("/tokenize", {}, "prompt", "one of prompt and messages"),
    ("/tokenize", turns(ASKED) | {"documents": [{}]}, "documents", "is not supported here"),
    ("/tokenize", turns(ASKED) | {"tools": [{}]}, "tools[0].type", "is required"),
    ("/tokenize", turns(ASKED) | tools("a b"), "tools[0].function.name", "letters, digits"),
    (
        "/tokenize",
        turns(ASKED) | {"chat_template_kwargs": {"tools": 1}},
        "chat_template_kwargs",
        "cannot set",
    ),
]  # fmt: skip


async def test_mistakes_are_told_in_plain_words_with_their_field(tmp_path: Path) -> None:
    async with (
        running_router(tmp_path, {"v": FakeVerifier()}) as router,
        http_client(router) as client,
    ):
        for path, body, param, said in BODIES:
            answer = await client.post(path, json=body)
            assert answer.status_code in (400, 404), (body, answer.text)
            error: dict[str, Any] = answer.json()["error"]
            assert error["param"] == param and said in error["message"], (body, error)
            assert not INTERNALS.search(error["message"]), error
            assert not INTERNALS.search(error["param"]), error


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (CHAT, tools("f"), "unsupported"),
        (CHAT, tools("f", "f"), "invalid_tools"),
        (CHAT, turns(ASKED, called("{")), "invalid_request"),
        (CHAT, turns(ASKED, CALLS), "invalid_request"),
        (CHAT, turns(), "invalid_request"),
        (
            "/tokenize",
            turns(ASKED) | {"continue_final_message": True, "add_generation_prompt": True},
            "invalid_request",
        ),
    ],
)
async def test_the_same_refusal_has_the_same_code(
    router: RouterService, path: str, body: object, code: str
) -> None:
    async with http_client(router) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == code


async def test_a_body_that_is_no_object_blames_no_field(router: RouterService) -> None:
    async with http_client(router) as client:
        error = (await client.post(COMPLETIONS, json=[1])).json()["error"]
        assert (error["param"], error["message"]) == (None, "The body must be a JSON object")
        many = await client.post(COMPLETIONS, json={"prompt": "a", "stop": 5, "n": "x", "seed": []})
        assert many.json()["error"]["message"].count(";") == 2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/nothing"])
async def test_unknown_routes_say_what_is_offered(router: RouterService, path: str) -> None:
    async with http_client(router) as client:
        answer = await client.post(path, json={})
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message.startswith(f"POST {path} is not served here; these are: ")
        for offered in ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models"):
            assert offered in message
        listed = message.split(": ", 1)[1].split(", ")
        assert "GET /" in listed and "GET /openapi.json" in listed
        for each in listed:
            method, _, offered = each.partition(" ")
            if method == "GET" and "{" not in offered:
                assert (await client.get(offered)).status_code == 200, offered
        answer = await client.get("/v1/completions")
        assert answer.status_code == 405 and answer.headers["allow"] == "POST"
        assert answer.json()["error"]["message"].endswith("the path takes POST")
        for offered in ("/v1/models", "/version", "/metrics", "/", "/openapi.json"):
            answer = await client.post(offered)
            assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD", offered
            assert answer.json()["error"]["message"].endswith("the path takes GET, HEAD")


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models", "/version", "/metrics", "/"])
async def test_heads_are_those_of_gets(router: RouterService, path: str) -> None:
    async with http_client(router) as client:
        head, get = await client.head(path), await client.get(path)
        assert head.status_code == get.status_code == 200 and head.content == b""
        assert head.headers["content-length"] == str(len(get.content))
