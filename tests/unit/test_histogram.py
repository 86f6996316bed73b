"""Histograms that rounds are counted in say what Prometheus' own would."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from outrider.histogram import BatchHistogram, PartsHistogram


def said(registry: CollectorRegistry) -> list[str]:
    """What is scraped, but for when it began."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "created" not in line]


def test_a_batch_histogram_says_what_prometheus_own_says() -> None:
    values, buckets = [2**-10, 2**-9, 0.5, 7.0, 2**-5], (2**-10, 2**-5, 1.0)
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    batch = BatchHistogram("x_seconds", "Text.", buckets, mine)
    single = Histogram("x_seconds", "Text.", buckets=buckets, registry=theirs)
    batch.observe()
    batch.observe(*values[:3])
    batch.observe(*values[3:])
    batch.observe(*(10 * values))
    for value in 11 * values:
        single.observe(value)
    assert said(mine) == said(theirs)
    assert (batch.count, batch.sum) == (55, sum(11 * values))


def test_so_does_one_by_part() -> None:
    mine, theirs = CollectorRegistry(), CollectorRegistry()
    parts = PartsHistogram("x_seconds", "Text.", ["a", "b"], (0.5, 2), mine).parts
    single = Histogram("x_seconds", "Text.", ["part"], buckets=(0.5, 2), registry=theirs)
    for part, value in (("a", 0.5), ("b", 0.75), ("a", 3.0)):
        parts[part].observe(value)
        single.labels(part).observe(value)
    assert said(mine) == said(theirs)
