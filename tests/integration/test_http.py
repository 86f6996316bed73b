"""OpenAI's API on the real three processes."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from outrider.client import Client
from outrider.text.tokenizer import Tokenizer
from tests.integration.stack import Stack, StackOptions
from tests.waiting import wait_until

PROMPT = "The quick brown fox"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FREE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    return {"router": ["--http", "127.0.0.1:0", "--model-name", "tiny"]}


@pytest.fixture
def api(stack: Stack) -> Iterator[OpenAI]:
    url = f"http://{stack.router.ready['http']}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def text_of(api: OpenAI, *, stream: bool = False, **options: Any) -> str:
    extra = FREE | options.pop("extra", {})
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 32, "extra_body": extra} | options
    if not stream:
        return str(api.completions.create(**asked).choices[0].text)
    with api.completions.create(stream=True, **asked) as chunks:
        return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.8, "seed": 7, "extra": {"drafter": "ngram", "draft_tokens": 6}},
        {"temperature": 0.8, "seed": 7, "extra": {"speculate": False}},
        {"temperature": 0.8, "seed": 7, "extra": {"top_k": 50, "repetition_penalty": 1.3}},
    ],
)
def test_text_is_that_of_grpc_whole_and_streamed(
    api: OpenAI, client: Client, options: dict[str, Any]
) -> None:
    same = {key: value for key, value in options.items() if key != "extra"}
    same |= FREE | options.get("extra", {})
    wanted = client.generate(PROMPT, max_tokens=32, **same).text
    assert text_of(api, **options) == wanted
    assert text_of(api, stream=True, **options) == wanted


def test_answers_to_a_prompt_have_the_seeds_that_follow(api: OpenAI, client: Client) -> None:
    answer = api.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=16,
        n=3,
        seed=41,
        temperature=0.9,
        extra_body=FREE,
    )
    wanted = [
        client.generate(PROMPT, max_tokens=16, temperature=0.9, seed=seed, ignore_eos=True).text
        for seed in (41, 42, 43)
    ]
    assert [choice.text for choice in answer.choices] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_was_served_before_is_counted_as_cached(api: OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": f"{stream} " + PROMPT * 4,
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": FREE,
    }
    found = []
    for _ in range(2):
        if stream:
            *parts, last = api.completions.create(
                stream=True, stream_options={"include_usage": True}, **asked
            )
            text, usage = "".join(part.choices[0].text for part in parts), last.usage
        else:
            whole = api.completions.create(**asked)
            text, usage = whole.choices[0].text, whole.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        found.append((text, cached))
        assert cached is not None and cached < usage.prompt_tokens
    (first, none), (again, cached) = found
    assert first == again
    assert none == 0 and cached is not None and cached > 0


def test_what_speculation_did_is_told_with_the_usage(api: OpenAI) -> None:
    answer = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=48, temperature=0, extra_body=FREE
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 48
    told = answer.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    details = answer.usage.completion_tokens_details
    assert details is not None
    drafted = told["num_draft_tokens"]
    assert drafted > 0
    assert details.accepted_prediction_tokens == told["num_accepted_draft_tokens"]
    assert details.rejected_prediction_tokens == drafted - told["num_accepted_draft_tokens"]
    # The first token comes with the prompt, every other one with a round.
    assert told["tokens_per_round"] == pytest.approx(47 / told["rounds"], abs=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_an_answer_has_the_form_that_was_asked_for(api: OpenAI, fields: dict[str, Any]) -> None:
    answer = api.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Name a colour."}],
        temperature=0.9,
        seed=3,
        max_tokens=200,
        extra_body=fields,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ['say "yes"', "no\nway"]}, 'say "yes"|no\nway'),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, "a*cb*"),
    ],
)
def test_expressions_choices_and_grammars_are_kept_to(
    api: OpenAI, fields: dict[str, Any], pattern: str
) -> None:
    text = (
        api.completions.create(
            model="tiny", prompt=PROMPT, temperature=0.9, seed=5, max_tokens=300, extra_body=fields
        )
        .choices[0]
        .text
    )
    assert re.fullmatch(pattern, text), text


def test_no_token_comes_that_is_forbidden_with_and_without_drafts(
    api: OpenAI, client: Client, tiny_target: Path
) -> None:
    tokenizer = Tokenizer.load(tiny_target)
    asked: dict[str, Any] = {"allowed_token_ids": list(range(60, 110))}
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 7}

    def emitted(**more: Any) -> tuple[int, ...]:
        options = {**sampled, **asked, **more}
        return client.generate(PROMPT, max_tokens=32, ignore_eos=True, **options).token_ids

    pairs = list(itertools.pairwise(emitted()))
    # What the tokenizer writes in these two tokens, and not in one.
    bad = next(pair for pair in pairs if tokenizer.encode(tokenizer.decode(pair)) == pair)
    asked["bad_words"] = [tokenizer.decode(bad)]
    plain = emitted(speculate=False)
    assert len(plain) == 32 and set(plain) <= set(asked["allowed_token_ids"])
    assert bad not in itertools.pairwise(plain)
    tree = {"drafter": "eagle3", "draft_tokens": 8, "draft_top_k": 3}
    for drafter in (tree, {"drafter": "ngram"}):
        assert emitted(**drafter) == plain
        for stream in (False, True):
            text = text_of(api, stream=stream, extra={**asked, **drafter}, **sampled)
            assert text == tokenizer.decode(plain)
    for refused in ({"allowed_token_ids": []}, {"allowed_token_ids": [10**6]}, {"bad_words": [""]}):
        with pytest.raises(openai.BadRequestError):
            text_of(api, extra=refused)


def test_a_form_that_cannot_be_is_a_400(api: OpenAI) -> None:
    for fields in (
        {"guided_regex": "("},
        {"guided_json": {"type": "nothing"}},
        {"structured_outputs": {"grammar": "start: nowhere"}},
    ):
        with pytest.raises(openai.BadRequestError):
            text_of(api, extra=fields)


def test_logprobs_are_the_targets_in_both_forms_and_without_drafts(api: OpenAI) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "extra_body": FREE, "model": "tiny"}
    whole = api.completions.create(prompt=PROMPT, logprobs=3, **asked).choices[0].logprobs  # type: ignore[call-overload]
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == 8
    for token, logprob, top in zip(
        whole.tokens, whole.token_logprobs, whole.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) <= 0.0
    turns = [{"role": "user", "content": "hi"}]
    chat = api.chat.completions.create(messages=turns, logprobs=True, top_logprobs=2, **asked)  # type: ignore[call-overload]
    content = chat.choices[0].logprobs.content
    assert len(content) == 8
    for token in content:
        assert len(token.top_logprobs) == 2 and token.logprob == token.top_logprobs[0].logprob
    plain = {**asked, "extra_body": {**FREE, "speculate": False}}
    alone = api.completions.create(prompt=PROMPT, logprobs=0, **plain).choices[0].logprobs  # type: ignore[call-overload]
    assert alone.tokens == whole.tokens
    assert alone.token_logprobs == pytest.approx(whole.token_logprobs, abs=1e-4)


def idle(client: Client) -> bool:
    info = client.server_info()
    return info.running == info.queued == 0 and all(v.sessions == 0 for v in info.verifiers)


def test_leaving_a_stream_frees_the_verifier(api: OpenAI, client: Client) -> None:
    with api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1500, stream=True, extra_body=FREE
    ) as stream:
        next(iter(stream))
    wait_until(lambda: idle(client), timeout_s=30.0, what="freed verifier")


def test_bad_requests_are_refused_with_what_is_allowed(api: OpenAI) -> None:
    for options in ({"max_tokens": 10**6}, {"temperature": 101.0}, {"prompt": [10**6]}):
        with pytest.raises(openai.BadRequestError):
            text_of(api, **options)
    assert text_of(api)


def test_the_router_still_needs_no_torch() -> None:
    program = "import sys, outrider_router.api.http; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_sigterm_ends_running_streams_whole_and_the_process(
    stack: Stack, tmp_path: Path, api: OpenAI
) -> None:
    # The last test of this file: it ends the router that the others share.
    with api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_body=FREE
    ) as stream:
        chunks = iter(stream)
        next(chunks)
        stack.router.terminate()
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert stack.router.wait_ended() in (0, -signal.SIGTERM)
