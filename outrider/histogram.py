"""Prometheus histograms that cost a round little: many values at once, or one of each part."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

FEW: Final = 8
"""Up to so many values are counted one by one, which is sooner done than an array is made."""


class Buckets:
    """Values counted by bucket. One writing thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ones in ascending order, without infinity."""
        self._bounds = [float(bound) for bound in bounds]
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.sum = 0.0
        """Of all values so far."""

    @property
    def count(self) -> int:
        """Values so far."""
        return int(self._counts.sum())

    def observe(self, *values: float) -> None:
        """Count values."""
        if len(values) <= FEW:
            for value in values:
                self._counts[bisect_left(self._bounds, value)] += 1
                self.sum += value
            return
        array = np.array(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self.sum += float(array.sum())

    def cumulated(self) -> list[tuple[str, float]]:
        """Values up to each bound, as a metric family has them."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))


class BatchHistogram(Buckets, Collector):
    """A histogram without labels; one call a round instead of one a value."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry
    ) -> None:
        super().__init__(buckets)
        self._name, self._text = name, text
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The histogram at this moment."""
        yield HistogramMetricFamily(
            self._name, self._text, buckets=self.cumulated(), sum_value=self.sum
        )


class PartsHistogram(Collector):
    """A histogram with the label `part`."""

    def __init__(
        self,
        name: str,
        text: str,
        parts: Sequence[str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text = name, text
        self.parts = {part: Buckets(buckets) for part in parts}
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The histograms of all parts at this moment."""
        family = HistogramMetricFamily(self._name, self._text, labels=["part"])
        for part, held in self.parts.items():
            family.add_metric([part], held.cumulated(), held.sum)
        yield family
