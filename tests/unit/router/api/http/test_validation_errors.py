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
ASKED = {"role": "user", "content": "Hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}


def turns(*messages: object) -> dict[str, object]:
    return {"messages": list(messages)}


def prompt(**fields: object) -> dict[str, object]:
    return {"prompt": "a", **fields}


BODIES: list[tuple[str, object, str, str]] = [
    (CHAT, turns({"role": "user", "content": [{"type": "image_url"}]}),
     "messages[0].content[0].type", "must be 'text', got \"image_url\""),
    (CHAT, turns({"role": "user", "content": 5}), "messages[0].content",
     "must be a string or a list of parts of type 'text', got 5"),
    (CHAT, turns({"role": "assistant", "content": None}), "messages[0].content", "got null"),
    (CHAT, turns(ASKED, CALLS), "messages[1].tool_calls", "is not supported here"),
    (CHAT, turns(ASKED, CALLS | {"content": "a"}), "messages[1].tool_calls", "may be null or []"),
    (CHAT, turns(ASKED, {"role": "tool", "tool_call_id": "a", "content": "b"}),
     "messages[1].role", "no tool calling"),
    (CHAT, turns(ASKED | {"tool_call_id": "a"}), "messages[0].tool_call_id", "not supported here"),
    (CHAT, turns(ASKED, {"role": "tool", "content": "b"}), "messages[1].role", "no tool calling"),
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
    ("/tokenize", turns(CALLS), "messages[0].tool_calls", "is not supported here"),
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
        (CHAT, turns(ASKED) | {"tools": [{}]}, "unsupported"),
        (CHAT, turns(ASKED, CALLS), "unsupported"),
        (CHAT, turns(ASKED, CALLS | {"content": "a"}), "unsupported"),
        (CHAT, turns(ASKED | {"tool_call_id": "a"}), "unsupported"),
        (CHAT, turns(ASKED, {"role": "tool", "tool_call_id": "a", "content": "b"}), "unsupported"),
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


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/nothing"])
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
