"""Verdicts whose features lie in a lane's memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from outrider_drafter.engine import DraftEngine

from outrider.spec.plan import Plan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import FeatureRows, Proposal, Verdicts
from tests.unit.drafter.helpers import Script, drain, name_of

Carry = Callable[[Verdicts], Verdicts]


def told_together(
    engine: DraftEngine,
    mix: Sequence[tuple[Plan, SamplingParams]],
    ends: Sequence[Sequence[int]],
    carry: Carry = lambda verdicts: verdicts,
) -> list[dict[str, Proposal]]:
    """As `told`, each round being one message, which `carry` brings."""
    scripts = [Script(f"s{i}", seed=20 + i) for i in range(len(mix))]
    for script, (plan, sampling) in zip(scripts, mix, strict=True):
        engine.handle(1, script.start(plan=plan, sampling=sampling))
    rounds = []
    for round_ends in ends:
        entries = [script.entry(end) for script, end in zip(scripts, round_ends, strict=True)]
        engine.handle(1, carry(Verdicts.of(entries)))
        rounds.append({name_of(p): p for p in drain(engine)})
    return rounds


class Lender:
    """Memory as a lane lends it: read-only, and written over as soon as nobody looks at it."""

    def __init__(self, gap: int) -> None:
        """`gap`: rows of somebody else's between those of two sessions."""
        self._gap = gap
        self.lent = 0
        """Frames that somebody looks at."""

    def __call__(self, verdicts: Verdicts) -> Verdicts:
        """The same verdicts, their features lent."""
        if verdicts.features is None:
            return verdicts
        rows, counts = verdicts.features.joined(), verdicts.feature_counts
        offsets = np.cumsum(counts + self._gap) - counts
        memory = np.full((int((counts + self._gap).sum()), rows.shape[1]), np.nan, np.float32)
        for offset, first, count in zip(offsets, verdicts.first_rows(), counts, strict=True):
            memory[offset : offset + count] = rows[first : first + count]
        held: NDArray[Any] = np.frombuffer(memory.data.cast("B"), np.uint8)
        self.lent += 1
        weakref.finalize(held, self._write_over, memory)
        lying = np.frombuffer(held.data.toreadonly(), np.float32).reshape(memory.shape)
        features = FeatureRows(dtype=verdicts.features.dtype, pieces=(lying,))
        return replace(verdicts, features=features, feature_offsets=offsets)

    def _write_over(self, memory: NDArray[np.float32]) -> None:
        self.lent -= 1
        memory[:] = np.nan
