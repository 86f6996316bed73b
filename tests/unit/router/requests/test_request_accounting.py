"""What the router counts: a request's tally, sums over events, batches of latencies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from outrider_router.base.metrics import BatchHistogram, RouterMetrics
from outrider_router.requests.request_output import SpecCounters
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from outrider.errors import CancelledRequestError
from outrider.spec.decoding_mode import DecodingModeReason
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    PAUSED,
    TARGET_ONLY,
    FinishReason,
    SessionEvents,
    SpecStats,
)
from outrider.wire.spec_stats_accumulator import REASON_FLAGS, add_round, describe_decision

PLANNED = (
    0,
    PAUSED | REASON_FLAGS[DecodingModeReason.PROBE],
    REASON_FLAGS[DecodingModeReason.FASTER],
)
AHEAD = ((False, False), (True, False), (True, True))
ROUNDS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.integers(0, 6),
        st.booleans(),
        st.booleans(),
        st.sampled_from(PLANNED),
        st.sampled_from(AHEAD),
    ).map(lambda r: (max(r[0], r[1]), min(r[0], r[1]), *r[2:])),
    max_size=12,
)
Rounds = list[tuple[int, int, bool, bool, int, tuple[bool, bool]]]


def expected(rounds: Rounds) -> SpecStats:
    stats = SpecStats()
    for proposed, accepted, fallback, target_only, planned, ahead in rounds:
        stats = add_round(
            stats, proposed, accepted, accepted + 1, fallback, target_only, planned, *ahead
        )
    return stats


def flags_of(fallback: bool, target_only: bool, planned: int, ahead: tuple[bool, bool]) -> int:
    flags = FALLBACK * fallback | TARGET_ONLY * target_only | planned
    return flags | LOOKED_AHEAD * ahead[0] | LOOK_AHEAD_HIT * ahead[1]


@given(ROUNDS)
def test_a_tally_counts_what_add_round_counts(rounds: Rounds) -> None:
    tally = SpecCounters()
    for proposed, accepted, fallback, target_only, planned, ahead in rounds:
        tally.add_round(
            emitted=accepted + 1,
            flags=flags_of(fallback, target_only, planned, ahead),
            proposed=proposed,
            accepted=accepted,
        )
    assert tally.to_stats() == expected(rounds)


@given(ROUNDS)
def test_a_message_of_events_counts_what_its_rounds_count(rounds: Rounds) -> None:
    stats, rows = expected(rounds), len(rounds)
    counts = np.array([r[1] + 1 for r in rounds] + [1], np.uint32)
    metrics = RouterMetrics()
    # The last row is the token that prefill emits: no round.
    metrics.record_events(
        SessionEvents(
            handles=np.arange(rows + 1, dtype=np.uint32),
            round_ids=np.array([*range(1, rows + 1), 0], np.uint32),
            counts=counts,
            tokens=np.zeros(int(counts.sum()), np.int32),
            finish_reasons=np.zeros(rows + 1, np.uint8),
            flags=np.array([flags_of(*r[2:]) for r in rounds] + [0], np.uint8),
            proposed=np.array([r[0] for r in rounds] + [0], np.uint16),
            accepted=np.array([r[1] for r in rounds] + [0], np.uint16),
        )
    )

    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"outrider_{name}_total", labels) or 0.0

    assert value("rounds") == stats.rounds
    assert value("round_tokens") == stats.emitted
    assert value("spec_decode_num_drafts") == sum(r[0] > 0 for r in rounds)
    assert value("spec_decode_num_draft_tokens") == stats.proposed
    assert value("spec_decode_num_accepted_tokens") == stats.accepted
    assert value("fallback_rounds") == stats.fallback_rounds
    assert value("undrafted_rounds") == stats.fallback_rounds, "no row says that it has a drafter"
    assert value("target_only_rounds") == stats.target_only_rounds
    assert value("look_ahead_rounds") == stats.look_ahead_rounds
    for kind in ("hit", "fresh"):
        assert value("look_ahead_drafted_rounds", kind=kind) == getattr(stats, f"{kind}_rounds")
        found = value("look_ahead_accepted_tokens", kind=kind)
        assert found == getattr(stats, f"{kind}_accepted")
    per_depth = [
        value("spec_decode_num_accepted_tokens_per_pos", position=str(depth))
        for depth in range(len(stats.accepted_per_depth))
    ]
    assert per_depth == list(stats.accepted_per_depth)


def test_rounds_without_a_drafter_are_told_from_rounds_without_its_proposal() -> None:
    metrics, flags = RouterMetrics(), [0, FALLBACK, FALLBACK | DRAFTER_ATTACHED, DRAFTER_ATTACHED]
    one = np.ones(4)
    metrics.record_events(
        SessionEvents(
            handles=one.astype(np.uint32),
            round_ids=one.astype(np.uint32),
            counts=one.astype(np.uint32),
            tokens=one.astype(np.int32),
            finish_reasons=np.zeros(4, np.uint8),
            flags=np.array(flags, np.uint8),
            proposed=np.zeros(4, np.uint16),
            accepted=np.zeros(4, np.uint16),
        )
    )
    for name, count in (("rounds", 4), ("fallback_rounds", 2), ("undrafted_rounds", 1)):
        assert metrics.registry.get_sample_value(f"outrider_{name}_total") == count


def test_waits_of_half_an_hour_have_a_bucket() -> None:
    registry = RouterMetrics().registry
    for name in (
        "e2e_request_latency_seconds",
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
    ):
        labels = {"le": "1800.0"}
        assert registry.get_sample_value(f"outrider_{name}_bucket", labels) == 0.0


def test_an_outcome_has_one_spelling() -> None:
    metrics = RouterMetrics()
    for outcome in (FinishReason.CANCELLED.value, CancelledRequestError.code):
        metrics.record_request_end(outcome, None, 0.0, 0, 1.0)
    (family,) = metrics.requests.collect()
    outcomes = {s.labels["outcome"] for s in family.samples if s.name.endswith("_total")}
    assert {"cancelled", "length", "unavailable"} <= outcomes
    assert all(outcome == outcome.lower() for outcome in outcomes)
    labels = {"outcome": "cancelled"}
    assert metrics.registry.get_sample_value("outrider_requests_total", labels) == 2


def test_a_batch_histogram_says_what_prometheus_own_says() -> None:
    values, buckets = [0.001, 0.0011, 0.5, 7.0, 0.02], (0.001, 0.02, 1.0)
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    batch = BatchHistogram("x_seconds", "Text.", buckets, mine)
    single = Histogram("x_seconds", "Text.", buckets=buckets, registry=theirs)
    batch.observe_values()
    batch.observe_values(*values[:3])
    batch.observe_values(*values[3:])
    for value in values:
        single.observe(value)
    text = generate_latest(theirs).decode()
    kept = [line for line in text.splitlines() if "created" not in line]
    assert generate_latest(mine).decode().splitlines() == kept


def test_decisions_are_told_in_words() -> None:
    assert describe_decision(0) == describe_decision(PAUSED) == ""
    assert (
        describe_decision(FALLBACK | REASON_FLAGS[DecodingModeReason.FASTER]) == "speculate/faster"
    )
    assert (
        describe_decision(PAUSED | REASON_FLAGS[DecodingModeReason.MEASURING]) == "plain/measuring"
    )
