"""What sampling parameters may be, and what a drafter is told of them."""

from __future__ import annotations

import math

import pytest

from outrider.errors import InvalidRequestError
from outrider.spec.noise import NoiseStream, stream_key
from outrider.spec.sampling import MAX_BIASED_IDS, Rule, SamplingParams

TOLD = {
    Rule.GREEDY: None,
    Rule.COUPLED: NoiseStream.TARGET,
    Rule.REJECTION: NoiseStream.DRAFT,
    Rule.TARGET_ONLY: None,
}


@pytest.mark.parametrize("rule", Rule)
def test_a_drafter_is_told_the_stream_of_its_guesses_and_nothing_else(rule: Rule) -> None:
    params = SamplingParams(temperature=0.8, rule=rule, seed=2**63 + 9, top_k=4)
    told, stream = params.for_drafter(), TOLD[rule]
    assert told.seed == 0 and (told.temperature, told.rule, told.top_k) == (0.8, rule, 4)
    assert told.draft_key == (0 if stream is None else stream_key(params.seed, stream))
    assert told.for_drafter() == told
    for other in NoiseStream:
        assert params.has_noise_stream(other)
        assert told.has_noise_stream(other) is (other is stream)
        if other is stream:
            assert told.stream_key(other) == params.stream_key(other)
        else:
            with pytest.raises(InvalidRequestError, match="stays with the verifier"):
                told.stream_key(other)


def test_at_temperature_zero_no_rule_needs_noise() -> None:
    assert SamplingParams(rule=Rule.REJECTION, seed=5).for_drafter().draft_key == 0


def test_a_key_stands_in_the_place_of_the_seed() -> None:
    with pytest.raises(InvalidRequestError, match="in the place of the seed"):
        SamplingParams(seed=1, draft_key=2)
    with pytest.raises(InvalidRequestError, match="64 bits"):
        SamplingParams(draft_key=2**64)


def test_a_bias_may_name_any_distinct_ids() -> None:
    entries = tuple((id_, 100.0 * (-1) ** id_) for id_ in range(MAX_BIASED_IDS))
    assert SamplingParams(logit_bias=entries).logit_bias == entries


@pytest.mark.parametrize(
    "entries",
    [
        ((1, 0.5), (1, 0.5)),
        ((-1, 0.5),),
        ((1, 100.5),),
        ((1, -math.inf),),
        ((1, math.nan),),
        tuple((id_, 0.0) for id_ in range(MAX_BIASED_IDS + 1)),
    ],
)
def test_other_biases_are_refused(entries: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias=entries)
