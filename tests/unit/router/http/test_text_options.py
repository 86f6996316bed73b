"""What ends a text, and special tokens, where they are to be part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from outrider_router.service import RouterService

from outrider.wire.messages import SessionSpec
from tests.fakes.tokenizer import EOS_ID
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed
from tests.unit.router.http.helpers import chunks, http_client, texts

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
