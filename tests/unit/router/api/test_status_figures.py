"""Figures and curves of the status page follow from samples of the metrics."""

from __future__ import annotations

import pytest
from outrider_router.api.status_page.figures import (
    Interval,
    estimate_percentile,
    last_interval,
    make_curves,
    make_figures,
)
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.metrics_history import MetricsSample, VerifierTotals, make_sample

from outrider.wire.messages import SpecStats


def sample_of(
    metrics: RouterMetrics, time_s: float, verifiers: dict[str, VerifierTotals] | None = None
) -> MetricsSample:
    return make_sample(metrics, time_s=time_s, running=0, waiting=0, verifiers=verifiers or {})


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((2, 2, 0), 0.5, 1.0),
        ((0, 4, 0), 0.5, 2.0),
        ((0, 0, 1), 0.95, 3.0),
        ((99, 0, 1), 1.0, 3.0),
    ],
)
def test_percentiles_lie_within_their_bucket(
    counts: tuple[int, ...], share: float, value: float | None
) -> None:
    assert estimate_percentile((1.0, 3.0), counts, share) == value


def test_an_idle_router_has_no_figures_instead_of_zeros() -> None:
    metrics = RouterMetrics()
    old, now = sample_of(metrics, 0.0), sample_of(metrics, 20.0)
    figures = make_figures([old], now)
    assert figures["time_to_first_token_ms_p50"] is None
    assert figures["acceptance"] is None
    assert figures["tokens_per_s"] == 0.0
    assert make_figures([now], now)["tokens_per_s"] is None


def test_rates_are_of_the_last_seconds_and_shares_of_the_last_minutes() -> None:
    metrics = RouterMetrics()
    samples = [sample_of(metrics, 0.0)]
    metrics.generation_tokens.inc(1000)
    metrics.draft_tokens.inc(100)
    metrics.accepted_tokens.inc(60)
    metrics.time_to_first_token.observe_values(0.15)
    samples.append(sample_of(metrics, 100.0))
    metrics.generation_tokens.inc(50)
    figures = make_figures(samples, sample_of(metrics, 110.0))
    assert figures["tokens_per_s"] == 5.0
    assert figures["acceptance"] == 0.6
    assert 100.0 < figures["time_to_first_token_ms_p50"] <= 200.0
    later = make_figures([*samples, sample_of(metrics, 500.0)], sample_of(metrics, 900.0))
    assert later["acceptance"] is None


def test_the_interval_begins_at_the_newest_sample_that_is_old_enough() -> None:
    metrics = RouterMetrics()
    samples = [sample_of(metrics, 10.0 * place) for place in range(5)]
    now = sample_of(metrics, 43.0)
    assert last_interval(samples, now, 20.0).seconds == 23.0
    assert last_interval(samples, now, 1000.0).seconds == 43.0


def test_a_verifier_that_was_restarted_counts_from_its_start() -> None:
    metrics = RouterMetrics()
    before = VerifierTotals(SpecStats(rounds=90, accepted=50), 7)
    after = VerifierTotals(SpecStats(rounds=8, accepted=5), 2)
    interval = Interval(
        sample_of(metrics, 0.0, {"v": before}), sample_of(metrics, 9.0, {"v": after})
    )
    assert interval.verifier_stats("v").rounds == 8
    assert interval.preemptions("v") == 2
    assert interval.verifier_stats("unknown") == SpecStats()


def test_curves_have_a_value_an_interval_and_gaps_where_nothing_ended() -> None:
    metrics = RouterMetrics()
    samples = [sample_of(metrics, 0.0)]
    metrics.generation_tokens.inc(30)
    metrics.time_per_output_token.observe_values(0.02)
    samples += [sample_of(metrics, 10.0), sample_of(metrics, 20.0)]
    curves = make_curves(samples, sample_of(metrics, 25.0))
    assert curves["ages_s"] == [15.0, 5.0, 0.0]
    assert curves["tokens_per_s"] == [3.0, 0.0, 0.0]
    values = curves["time_per_output_token_ms_p50"]
    assert values[0] is not None and values[1:] == [None, None]
    assert {len(column) for column in curves.values()} == {3}
    assert make_curves(samples[:1], samples[0])["ages_s"] == []
