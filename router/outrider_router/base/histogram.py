"""Prometheus histogram with batched updates: one call per round instead of one per value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

MAX_SINGLE_VALUES: Final = 8
"""Up to so many values are counted one by one, which is sooner done than an array is made."""


class BatchHistogram(Collector):
    """Counts values by bucket, one call per round. One writing thread."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        """`buckets`: upper bounds in ascending order, without infinity."""
        self._name, self._text = name, text
        self._bounds = [float(bound) for bound in buckets]
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0
        registry.register(self)

    @property
    def count(self) -> int:
        """Values so far."""
        return int(self._counts.sum())

    @property
    def sum(self) -> float:
        """Their sum."""
        return self._sum

    def observe_values(self, *values: float) -> None:
        """Count values."""
        if len(values) <= MAX_SINGLE_VALUES:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
                self._sum += value
            return
        array = np.array(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())

    def collect(self) -> Iterator[Metric]:
        """The histogram at this moment."""
        bounds = [*map(str, self._bounds), "+Inf"]
        counts = np.cumsum(self._counts).tolist()
        yield HistogramMetricFamily(
            self._name,
            self._text,
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._sum,
        )
