"""Options, prompts and the retry policy, without a server."""

from __future__ import annotations

import pytest

from outrider.client import RetryPolicy
from outrider.client.options import GenerateOptions, make_prompt, make_request, user
from outrider.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    InvalidRequestError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.wire.inference import ChatPrompt, TextPrompt, TokenPrompt
from outrider.wire.inference_codec import request_to_pb


def test_the_type_of_the_items_tells_what_a_prompt_is() -> None:
    assert make_prompt("text") == TextPrompt("text")
    assert make_prompt([1, 2]) == TokenPrompt((1, 2))
    assert make_prompt([user("Hi")]) == ChatPrompt((user("Hi"),))
    assert make_prompt(TextPrompt("as is")) == TextPrompt("as is")


@pytest.mark.parametrize("prompt", ["", [], [True], [1, user("Hi")], ["a"], 5, None, b"a", {1: 2}])
def test_anything_else_is_no_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        make_prompt(prompt)  # type: ignore[arg-type]


def test_what_is_left_out_stays_the_servers_choice() -> None:
    request = make_request("a", {})
    assert request.sampling.temperature is None
    assert request.stopping.max_tokens is None
    assert request.speculation.enabled is None
    assert request.speculation.look_ahead is None
    assert request.speculation.fan_out is None


def test_zero_is_a_value() -> None:
    request = make_request(
        "a",
        {
            "temperature": 0.0,
            "seed": 0,
            "draft_tokens": 0,
            "top_k": 0,
            "look_ahead": 0,
            "fan_out": 0,
        },
    )
    assert (request.sampling.temperature, request.sampling.seed, request.sampling.top_k) == (
        0.0,
        0,
        0,
    )
    assert request.speculation.draft_tokens == 0
    assert (request.speculation.look_ahead, request.speculation.fan_out) == (0, 0)


def test_a_logit_bias_is_a_mapping() -> None:
    request = make_request("a", {"logit_bias": {7: 1.5, 2: -100.0}})
    assert request.sampling.logit_bias == ((7, 1.5), (2, -100.0))


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (-1, 2**64 - 1), (-(2**63), 2**63)])
def test_a_negative_seed_is_what_it_is_over_http(seed: int, sent: int) -> None:
    assert make_request("a", {"seed": seed}).sampling.seed == sent


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 2**64}, r"^seed must be an integer in \[0, 2\^64\), got 18446744073709551616$"),
        ({"seed": -(2**63) - 1}, r"^seed must be"),
        ({"max_tokens": -1}, r"^max_tokens must be an integer in \[0, 2\^32\), got -1$"),
        ({"temperature": "hot"}, r"^temperature must be a number, got 'hot'$"),
        ({"priority": 2**40}, r"^priority must be an integer in \[-2\^31, 2\^31\)"),
        ({"ignore_eos": "yes"}, r"^ignore_eos must be true or false"),
        ({"request_id": 5}, r"^request_id must be a text"),
        ({"stop_token_ids": [1, -1]}, r"^stop_token_ids must each be an integer"),
        ({"logit_bias": {-1: 1.0}}, r"^logit_bias: "),
        ({"banned_token_ids": [-1] * 1000}, r"^banned_token_ids .{,160}$"),
    ],
)
def test_what_the_contract_cannot_hold_is_named(options: GenerateOptions, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        request_to_pb(make_request("a", options))


@pytest.mark.parametrize(
    "options", [{"stop": 3}, {"stop_token_ids": 3}, {"logit_bias": [(1, 2.0)]}, {"bad_words": 1}]
)
def test_what_is_no_sequence_or_mapping_is_named(options: GenerateOptions) -> None:
    (name,) = options
    with pytest.raises(InvalidRequestError, match=f"^{name} must be a "):
        make_request("a", options)


def test_one_stop_string_may_be_given_bare() -> None:
    assert make_request("a", {"stop": "END"}).stopping.stop == ("END",)


def test_misspelt_options_and_values_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="max_token"):
        make_request("a", {"max_token": 1})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(InvalidRequestError, match="coupled, rejection"):
        make_request("a", {"rule": "magic"})


STEADY = RetryPolicy(max_attempts=4, first_delay_s=1.0, max_delay_s=3.0, jitter=0.0)


def test_delays_double_up_to_the_longest() -> None:
    error = UnavailableError("gone")
    assert [STEADY.delay_s(attempt, error) for attempt in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, None]


def test_a_hint_is_honoured_and_an_absurd_one_gives_up() -> None:
    assert STEADY.delay_s(1, ResourceExhaustedError("full", retry_after_s=7.0)) == 7.0
    assert STEADY.delay_s(1, ResourceExhaustedError("full", retry_after_s=700.0)) is None


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhaustedError("full, and no hint"),
        InvalidRequestError("bad"),
        DeadlineExceededError("late"),
        OutriderError("?"),
    ],
)
def test_what_waiting_cannot_mend_is_not_retried(error: OutriderError) -> None:
    assert STEADY.delay_s(1, error) is None


def test_a_lost_connection_is_retried() -> None:
    assert STEADY.delay_s(1, ConnectionLostError("cut")) == 1.0
