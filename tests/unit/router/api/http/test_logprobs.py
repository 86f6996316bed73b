"""Logprobs in OpenAI's two forms, and the two forms in the same words whole and in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from outrider_router.api.http.logprobs import TokenTextTable, chat_logprobs, completion_logprobs
from outrider_router.api.http.response_models import ChatCompletionResponse, CompletionResponse
from outrider_router.api.http.response_writers import (
    ChatWriter,
    ChoiceState,
    CompletionWriter,
    ResponseWriter,
)
from outrider_router.api.http.usage import metrics_body, sum_stats

from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import FinishInfo, TokenLogprobs, Usage
from outrider.wire.messages import FinishReason
from outrider.wire.stats import SpecStats
from tests.fakes.tokenizer import make_tokenizer_dir
from tests.unit.router.api.http.helpers import chunks

FINISH = FinishInfo(
    reason=FinishReason.STOP_TOKEN,
    usage=Usage(prompt_tokens=4, completion_tokens=3),
    stats=SpecStats(
        rounds=4,
        emitted=9,
        proposed=12,
        accepted=5,
        fallback_rounds=1,
        accepted_per_depth=(3, 2),
        drafted_rounds=3,
    ),
    stop_token_id=1,
)


class Texts(TokenTextTable):
    """The table of a tokenizer that the test can ask, too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.tokenizer = tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> Texts:
    return Texts(Tokenizer.load(make_tokenizer_dir(tmp_path)))


def ids(texts: Texts, text: str) -> tuple[int, ...]:
    return texts.tokenizer.encode(text)


def test_a_token_is_its_text_its_bytes_or_its_name(texts: Texts) -> None:
    first, second = ids(texts, "\u00e9")
    assert (
        texts(first) == "\ufffd"
        and texts.raw_bytes(first) + texts.raw_bytes(second) == "\u00e9".encode()
    )
    assert (texts(2), texts.raw_bytes(2)) == ("<|im_end|>", b"")
    assert texts(10_000) == ""


def test_a_chats_tokens_have_bytes_and_alternatives(texts: Texts) -> None:
    a, b = ids(texts, "ab")
    told = chat_logprobs([a, 2], [TokenLogprobs(-0.5, ((a, -0.5), (b, -1.0))), OWN], texts)
    assert told["content"] == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -1.0, "bytes": [98]},
            ],
        },
        {"token": "<|im_end|>", "logprob": -2.0, "bytes": [], "top_logprobs": []},
    ]


OWN = TokenLogprobs(-2.0)


def test_a_completions_tokens_have_offsets_and_are_among_their_alternatives(
    texts: Texts,
) -> None:
    a, b = ids(texts, "ab")
    offsets = texts.offsets()
    offsets.add_tokens([a] * 7)
    told = completion_logprobs([b, 2], [TokenLogprobs(-3.0, ((a, -0.5),)), OWN], texts, offsets)
    assert told == {
        "tokens": ["b", "<|im_end|>"],
        "token_logprobs": [-3.0, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -3.0}, {"<|im_end|>": -2.0}],
        "text_offset": [7, 8],
    }


def made(
    kind: type[ResponseWriter], texts: Texts, *, stop_token_ids: tuple[int, ...] = ()
) -> ResponseWriter:
    return kind(
        request_id="r",
        model='a "model"',
        created=7,
        n=1,
        texts=texts,
        stop_token_ids=stop_token_ids,
        with_logprobs=True,
    )


@pytest.mark.parametrize("kind", [CompletionWriter, ChatWriter])
def test_chunks_say_the_same_as_the_whole(kind: type[ResponseWriter], texts: Texts) -> None:
    form, token_ids = made(kind, texts, stop_token_ids=(1,)), ids(texts, "abc")
    found = [TokenLogprobs(-float(n), ((id_, -float(n)),)) for n, id_ in enumerate(token_ids)]
    whole = ChoiceState(index=0, text=["ab", "c"], token_ids=list(token_ids), logprobs=found)
    whole.finish = FINISH
    told = json.loads(form.write_whole([whole]))
    answer: CompletionResponse | ChatCompletionResponse
    answer = (
        CompletionResponse if kind is CompletionWriter else ChatCompletionResponse
    ).model_validate(told)
    assert answer.choices[0].stop_reason == 1

    part = ChoiceState(index=0)
    stream = form.write_delta(part, "ab", token_ids[:2], found[:2], None)
    stream += form.write_delta(part, "c", token_ids[2:], found[2:], None)
    part.finish = FINISH
    parts = chunks(
        stream + form.write_end(part, None) + form.write_usage([part]) + "data: [DONE]\n\n"
    )
    *parts, end, last = parts
    assert end["choices"][0]["finish_reason"] == told["choices"][0]["finish_reason"] == "stop"
    assert end["choices"][0]["stop_reason"] == 1
    assert (last["usage"], last["metrics"]) == (told["usage"], told["metrics"])
    assert {part["model"] for part in parts} == {'a "model"'}
    assert joined([part["choices"][0]["logprobs"] for part in parts]) == told["choices"][0][
        "logprobs"
    ] | ({"refusal": None} if kind is ChatWriter else {})


def joined(parts: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Lists of parts one behind the other."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, value in (part or {}).items():
            whole[name] = whole.get(name, []) + value if isinstance(value, list) else value
    return whole


def test_the_models_own_end_is_no_stop_of_the_client(texts: Texts) -> None:
    choice = ChoiceState(index=0, has_started=True, finish=FINISH)
    (told,) = chunks(made(CompletionWriter, texts).write_end(choice, None) + "data: [DONE]\n\n")
    assert told["choices"][0]["stop_reason"] is None


def test_speculation_is_told_by_vllms_names_and_ours() -> None:
    told = metrics_body(sum_stats([FINISH.stats, FINISH.stats]))["speculative_decoding"]
    assert told == {
        "mean_acceptance_length": round(1 + 10 / 6, 4),
        "draft_acceptance_rate": round(10 / 24, 4),
        "num_spec_steps": 6,
        "num_draft_tokens": 24,
        "num_accepted_draft_tokens": 10,
        "acceptance_histogram": [0, 2, 4],
        "accepted_per_position": [6, 4],
        "rounds": 8,
        "tokens_per_round": round(18 / 8, 4),
        "fallback_rounds": 2,
        "paused_rounds": 0,
    }


def test_without_drafts_every_round_is_one_token() -> None:
    told = metrics_body(SpecStats(rounds=5, emitted=5))["speculative_decoding"]
    assert isinstance(told, dict)
    assert (told["mean_acceptance_length"], told["num_spec_steps"]) == (1.0, 0)
