"""NVIDIA's benchmark aiperf reads the acceptance of a request from the answer's `metrics`.

Its adapter for vLLM takes an object `metrics.speculative_decoding` of a response for its own if the
three keys below are there, reads the histogram as a list whose index is the number of accepted
draft tokens, and drops the whole record if one of the sums does not agree.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.api.http.usage import metrics_body, sum_stats
from outrider_router.requests.request_output import SpecCounters

from outrider.wire.messages import FALLBACK, PAUSED
from outrider.wire.stats import SpecStats

RECOGNISED_BY = ("acceptance_histogram", "num_spec_steps", "mean_acceptance_length")
ROUNDS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=40)


def accepted_record(body: dict[str, Any]) -> dict[int, int]:
    """The histogram that aiperf records of a response; fails where it would record nothing."""
    found = json.loads(json.dumps(body))["speculative_decoding"]
    assert all(key in found for key in RECOGNISED_BY)
    counts = found["acceptance_histogram"]
    assert isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
    histogram = {length: count for length, count in enumerate(counts) if count}
    accepted, drafted = found["num_accepted_draft_tokens"], found["num_draft_tokens"]
    assert sum(histogram.values()) == found["num_spec_steps"]
    assert sum(length * count for length, count in histogram.items()) == accepted <= drafted
    assert math.isfinite(found["mean_acceptance_length"])
    assert math.isfinite(found["draft_acceptance_rate"])
    return histogram


def counted(rounds: list[list[int]]) -> SpecStats:
    counters = SpecCounters()
    for accepted, proposed in rounds:
        flags = 0 if proposed else FALLBACK
        counters.add_round(emitted=accepted + 1, flags=flags, proposed=proposed, accepted=accepted)
    return counters.to_stats()


def test_rounds_count_by_what_they_accepted() -> None:
    stats = counted([[2, 3], [0, 3], [3, 3], [2, 4], [0, 0]])
    assert stats.acceptance_histogram == (1, 0, 2, 1)
    assert accepted_record(metrics_body(stats)) == {0: 1, 2: 2, 3: 1}


@given(ROUNDS)
def test_aiperf_takes_every_request(rounds: list[list[int]]) -> None:
    drafted = [accepted for accepted, proposed in rounds if proposed]
    expected = {length: drafted.count(length) for length in drafted}
    assert accepted_record(metrics_body(counted(rounds))) == expected


@given(ROUNDS, ROUNDS)
def test_several_answers_of_a_response_count_together(
    first: list[list[int]], second: list[list[int]]
) -> None:
    both = sum_stats([counted(first), counted(second)])
    assert accepted_record(metrics_body(both)) == accepted_record(
        metrics_body(counted([*first, *second]))
    )


@pytest.mark.parametrize("flags", [0, PAUSED, FALLBACK])
def test_a_request_without_drafts_has_a_record_without_steps(flags: int) -> None:
    counters = SpecCounters()
    counters.add_round(emitted=1, flags=flags, proposed=0, accepted=0)
    assert accepted_record(metrics_body(counters.to_stats())) == {}


def test_totals_that_were_not_counted_by_depth_have_no_histogram() -> None:
    totals = SpecStats(rounds=9, emitted=20, proposed=27, accepted=11, drafted_rounds=9)
    assert totals.acceptance_histogram == ()
