"""Structured output through router, verifier and drafter: what comes has the form that was asked
for, under every rule and draft, and bad forms are refused."""

from __future__ import annotations

import json
import re

import pytest

from outrider.client import Client, FinishReason, InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "Describe a person."


def conforms(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "age", "tags"}
    assert isinstance(found["name"], str) and len(found["name"]) <= 6
    assert isinstance(found["age"], int) and 0 <= found["age"] <= 99
    assert len(found["tags"]) <= 2 and set(found["tags"]) <= {"red", "green", "blue"}


@pytest.mark.parametrize("drafter", ["none", "eagle3", "ngram"])
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection", "target-only"])
def test_every_rule_and_drafter_answers_in_the_form_asked_for(
    client: Client, rule: str, drafter: str
) -> None:
    # A grammar wins over these: the answer ends where it is complete, and not before.
    result = client.generate(
        PROMPT,
        json_schema=SCHEMA,
        max_tokens=400,
        temperature=0.0 if rule == "greedy" else 0.9,
        rule=rule,
        seed=5,
        drafter=drafter,
        draft_tokens=6,
        draft_top_k=3 if drafter == "eagle3" else 1,
        ignore_eos=True,
        presence_penalty=0.5,
    )
    assert result.finish.reason is FinishReason.STOP_TOKEN
    conforms(result.text)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_drafts_do_not_change_the_text_and_masked_drafts_stand(client: Client, rule: str) -> None:
    options = {"temperature": 0.0 if rule == "greedy" else 1.1, "rule": rule, "seed": 9}
    plain = client.generate(PROMPT, json_schema=SCHEMA, max_tokens=300, speculate=False, **options)
    drafted = client.generate(
        PROMPT, json_schema=SCHEMA, max_tokens=300, drafter="eagle3", draft_tokens=4, **options
    )
    assert drafted.token_ids == plain.token_ids
    # Of a random model and head; what little a form leaves open is what both can agree on.
    assert drafted.finish.stats.accepted > 0


def test_the_other_forms_are_kept(client: Client) -> None:
    matched = client.generate(PROMPT, regex=r"(yes|no), [0-9]{3}", max_tokens=64)
    assert re.fullmatch(r"(yes|no), [0-9]{3}", matched.text)
    ruled = client.generate(
        PROMPT, grammar='start: "<" WORD ">"\nWORD: /[a-c]{2,4}/', max_tokens=64
    )
    assert re.fullmatch(r"<[a-c]{2,4}>", ruled.text)
    opened = client.generate(PROMPT, json_object=True, max_tokens=12, temperature=1.0, seed=1)
    assert opened.text.startswith("{")


def test_an_answer_cut_by_max_tokens_says_so(client: Client) -> None:
    cut = client.generate(PROMPT, json_schema=SCHEMA, max_tokens=4)
    assert cut.finish.reason is FinishReason.LENGTH
    with pytest.raises(json.JSONDecodeError):
        json.loads(cut.text)


def test_a_grammar_wins_over_bans_and_least_lengths(client: Client) -> None:
    # All that the grammar allows at first is banned, and the least length is beyond its end.
    banned = client.generate("x", regex="!", max_tokens=8).token_ids[:1]
    result = client.generate("x", regex="!", max_tokens=8, min_tokens=5, banned_token_ids=banned)
    assert result.text == "!" and result.finish.reason is FinishReason.STOP_TOKEN
    # Where the grammar leaves a choice the least length is kept.
    long = client.generate("x", regex="[ab]*", max_tokens=12, min_tokens=6)
    assert len(long.token_ids) >= 6


def test_stop_strings_cut_as_they_always_do(client: Client) -> None:
    result = client.generate(PROMPT, json_schema=SCHEMA, max_tokens=300, stop=['"age"'])
    assert result.finish.reason is FinishReason.STOP_STRING and '"age"' not in result.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"json_schema": '{"type": "wrong"}'}, "Invalid type"),
        ({"json_schema": "{no json"}, "it is not JSON"),
        ({"regex": "("}, "regex parse error"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "start: missing"}, "unknown name"),
    ],
)
def test_bad_forms_are_refused_with_the_reason(
    client: Client, options: dict[str, str], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why) as refused:
        client.generate("x", max_tokens=8, **options)
    assert refused.value.reason == "INVALID_STRUCTURE"
