"""What ends a text, and special tokens, where they are to be part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from outrider_router.api.http.response_models import ChatCompletionResponse, CompletionResponse
from outrider_router.requests.service import RouterService

from outrider.wire.messages import SessionSpec
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.api.http.helpers import chunks, http_client, texts
from tests.unit.router.helpers import assert_all_freed

START_ID = 1
START, END = "<|im_start|>", "<|im_end|>"


async def answered(router: RouterService, **body: object) -> dict[str, Any]:
    """The only choice; that of a stream has the same text, offsets and usage."""
    async with http_client(router) as client:
        asked = {"prompt": "abcd", "max_tokens": 12, **body}
        answer = (await client.post("/v1/completions", json=asked)).json()
        options = {"include_usage": True}
        asked |= {"stream": True, "stream_options": options}
        *parts, last = chunks((await client.post("/v1/completions", json=asked)).text)
    choice: dict[str, Any] = answer["choices"][0]
    assert texts(parts) == [choice["text"]]
    told = [part["choices"][0] for part in parts]
    assert [told[-1][name] for name in ("finish_reason", "stop_reason")] == [
        choice[name] for name in ("finish_reason", "stop_reason")
    ]
    for name in ("tokens", "text_offset"):
        if choice["logprobs"] is not None:
            pieces = [piece["logprobs"][name] for piece in told if piece["logprobs"]]
            assert sum(pieces, []) == choice["logprobs"][name]  # noqa: RUF017
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    return choice | {"used": answer["usage"]["completion_tokens"]}


@pytest.mark.parametrize("tokens_per_round", [1, 3])
async def test_a_stop_string_is_part_of_the_text_where_that_is_asked_for(
    tokens_per_round: int, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.tokens_per_round = tokens_per_round
    cut = await answered(router, stop=["da", "dab"])
    whole = await answered(router, stop=["da", "dab"], include_stop_str_in_output=True)
    assert (cut["text"], whole["text"]) == ("abc", "abcda")
    assert cut["stop_reason"] == whole["stop_reason"] == "da"
    assert cut["used"] == whole["used"] == 5
    never = await answered(router, stop=["dad"], include_stop_str_in_output=True)
    assert never["text"] == "abcdabcdabcd" and never["finish_reason"] == "length"
    await assert_all_freed(router, verifier)


def with_specials(spec: SessionSpec) -> Sequence[int]:
    """Special tokens among the text, and the end of the turn."""
    a, b = spec.token_ids[:2]
    return [a, START_ID, b, a, EOS_ID][: spec.max_new_tokens]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "aba"),
        ({"skip_special_tokens": False}, f"a{START}ba"),
        ({"include_stop_str_in_output": True}, "aba"),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            f"a{START}ba{END}",
        ),
    ],
)
async def test_special_tokens_have_text_where_that_is_asked_for(
    options: dict[str, bool], text: str, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = with_specials
    choice = await answered(router, logprobs=0, **options)
    assert choice["text"] == text
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    told = choice["logprobs"]
    assert told["tokens"] == ["a", START, "b", "a", END] and choice["used"] == 5
    if text.endswith(END):
        at = zip(told["text_offset"], told["tokens"], strict=True)
        assert all(text[offset:].startswith(token) for offset, token in at)
    elif START in text:
        assert [text[offset] for offset in told["text_offset"][:4]] == ["a", "<", "b", "a"]


async def test_a_stop_string_may_be_a_special_token(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = with_specials
    hidden = await answered(router, stop=["im_start"])
    assert hidden["text"] == "aba" and hidden["stop_reason"] is None
    shown = await answered(router, stop=["im_start"], skip_special_tokens=False)
    assert shown["text"] == "a<|" and shown["stop_reason"] == "im_start"
    included = await answered(
        router, stop=["im_start"], skip_special_tokens=False, include_stop_str_in_output=True
    )
    assert included["text"] == "a<|im_start" and included["used"] == shown["used"] == 2


async def both_ways(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An answer, and the chunks of the same as a stream."""
    whole = await client.post(f"/v1/{path}", json=body)
    stream = await client.post(f"/v1/{path}", json={**body, "stream": True})
    assert whole.status_code == stream.status_code == 200, whole.text
    return whole.json(), chunks(stream.text)


def ids_of(parts: list[dict[str, Any]]) -> list[int]:
    return [id_ for part in parts for id_ in part["choices"][0].get("token_ids", ())]


async def test_a_completions_ids_are_told(router: RouterService, verifier: FakeVerifier) -> None:
    verifier.script = with_specials
    prompt = list(router.tokenizer.encode("abc"))
    a, b = prompt[:2]
    body = {"prompt": "abc", "max_tokens": 9, "return_token_ids": True}
    async with http_client(router) as client:
        whole, parts = await both_ways(client, "completions", body)
        (choice,) = CompletionResponse.model_validate(whole).choices
        assert choice.prompt_token_ids == prompt
        assert choice.token_ids == [a, START_ID, b, a, EOS_ID] == ids_of(parts)
        told = ["prompt_token_ids" in part["choices"][0] for part in parts]
        assert told == [True] + [False] * (len(parts) - 1)
        assert parts[0]["choices"][0]["prompt_token_ids"] == prompt
        plain, parts = await both_ways(client, "completions", {**body, "return_token_ids": False})
        assert not ids_of(parts) and "token_ids" not in plain["choices"][0]


async def test_a_chats_ids_are_told(router: RouterService, verifier: FakeVerifier) -> None:
    verifier.script = with_specials
    messages = [{"role": "user", "content": "abc"}]
    prompt = list(router.tokenizer.encode_chat(messages))
    body = {"messages": messages, "max_tokens": 9, "return_token_ids": True}
    async with http_client(router) as client:
        whole, parts = await both_ways(client, "chat/completions", body)
    answer = ChatCompletionResponse.model_validate(whole)
    assert answer.prompt_token_ids == parts[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in part for part in parts[1:])
    assert answer.choices[0].token_ids == ids_of(parts) and len(ids_of(parts)) == 5


async def test_tokens_of_logprobs_may_be_called_by_their_ids(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.script = with_specials
    a, b = router.tokenizer.encode("ab")
    options = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    named = await answered(router, logprobs=1, **options)
    numbered = await answered(router, logprobs=1, return_tokens_as_token_ids=True, **options)
    wanted = [f"token_id:{id_}" for id_ in (a, START_ID, b, a, EOS_ID)]
    assert numbered["logprobs"]["tokens"] == wanted and numbered["text"] == named["text"]
    assert numbered["logprobs"]["text_offset"] == named["logprobs"]["text_offset"]
    tops = numbered["logprobs"]["top_logprobs"]
    assert all(name.startswith("token_id:") for top in tops for name in top)


@pytest.mark.parametrize("prompt", ["abc", "ids"])
async def test_a_completion_may_begin_with_its_prompt(
    prompt: str, router: RouterService, verifier: FakeVerifier
) -> None:
    ids = [START_ID, *router.tokenizer.encode("abc")]
    asked = "abc" if prompt == "abc" else ids
    async with http_client(router) as client:
        body = {"prompt": asked, "max_tokens": 2, "n": 2, "echo": True, "stop": ["b"]}
        whole, parts = await both_ways(client, "completions", body)
        said = [choice["text"] for choice in whole["choices"]]
        assert said == texts(parts, 2) == ["abca"] * 2
        assert whole["usage"]["completion_tokens"] == 4
        # Nothing of its own: the stop string is the first that comes.
        body |= {"stop": ["a"], "n": 1, "skip_special_tokens": False}
        whole, parts = await both_ways(client, "completions", body)
        begins = "abc" if prompt == "abc" else f"{START}abc"
        assert texts(parts) == [whole["choices"][0]["text"]]
        assert whole["choices"][0]["text"].startswith(begins)
    await assert_all_freed(router, verifier)


@pytest.mark.parametrize("special", [False, True])
async def test_offsets_are_places_in_the_text(
    router: RouterService, verifier: FakeVerifier, special: bool
) -> None:
    written = "h\u20ac<|im_start|>\u00e9z\U0001f600!"
    ids = router.tokenizer.encode(written)
    verifier.script = lambda spec: ids
    body = {"prompt": "abc", "max_tokens": 40, "logprobs": 0, "skip_special_tokens": not special}
    async with http_client(router) as client:
        whole, parts = await both_ways(client, "completions", body)
    (choice,) = whole["choices"]
    text, told = choice["text"], choice["logprobs"]
    assert text == (written if special else written.replace("<|im_start|>", ""))
    # Of the tokens of one character each begins where the character does.
    at = 2 + len("<|im_start|>") * special
    assert told["text_offset"] == [
        *(0, 1, 1, 1),
        2,
        *(at, at),
        at + 1,
        *(at + 2,) * 4,
        at + 3,
    ]
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if token in text:
            assert text[offset:].startswith(token), (token, offset)
    streamed = [part["choices"][0]["logprobs"] for part in parts]
    assert [at for part in streamed if part for at in part["text_offset"]] == told["text_offset"]


# ---- lengths that nobody asked for -------------------------------------------------------------


async def test_a_completions_own_length_is_cut_to_the_room_that_its_prompt_leaves(
    router: RouterService,
) -> None:
    async with http_client(router) as client:

        async def used(room: int, **more: object) -> int:
            body = {"prompt": "a" * (2048 - room), **more}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            count: int = answer.json()["usage"]["completion_tokens"]
            return count

        assert [await used(room) for room in (5, 16, 17)] == [5, 16, 16]
        # A minimum beyond the default raises that, as in chats.
        assert await used(100, min_tokens=20) == 20
        body = {"prompt": "a" * 2043, "max_tokens": 6}
        refused = await client.post("/v1/completions", json=body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
