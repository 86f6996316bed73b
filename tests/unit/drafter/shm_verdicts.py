"""Verdicts whose features lie in a lane's memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import FeatureRows, Verdict, Verdicts
from tests.unit.drafter.mixed_sessions import together


class Lender:
    """Memory as a lane lends it: read-only, and written over as soon as nobody looks at it."""

    def __init__(self, gap: int) -> None:
        """`gap`: rows of somebody else's between those of two sessions."""
        self._gap = gap
        self.lent = 0
        """Frames that somebody looks at."""

    def __call__(self, entries: Sequence[Verdict]) -> list[Verdicts]:
        """One message, its features lent."""
        (verdicts,) = together(entries)
        assert verdicts.features is not None
        rows, counts = verdicts.features.joined(), verdicts.feature_counts
        offsets = np.cumsum(counts + self._gap) - counts
        memory = np.full((int((counts + self._gap).sum()), rows.shape[1]), np.nan, np.float32)
        for offset, first, count in zip(offsets, verdicts.first_rows(), counts, strict=True):
            memory[offset : offset + count] = rows[first : first + count]
        held: NDArray[Any] = np.frombuffer(memory.data.cast("B"), np.uint8)
        self.lent += 1
        weakref.finalize(held, self._write_over, memory)
        lying = np.frombuffer(held.data.toreadonly(), np.float32).reshape(memory.shape)
        features = FeatureRows(dtype=verdicts.features.dtype, segments=(lying,))
        return [replace(verdicts, features=features, feature_offsets=offsets)]

    def _write_over(self, memory: NDArray[np.float32]) -> None:
        self.lent -= 1
        memory[:] = np.nan
