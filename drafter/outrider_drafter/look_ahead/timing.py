"""Measured durations of draft steps, and times from a draft to its verdict, by class.

All times in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final, Literal, NamedTuple

from outrider.spec.plan import DraftMethod
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES

SESSION_BUCKETS: Final = (1, 4, 8, 16, 32, 64)
"""Sessions that one launch drafts for, or scores: a device fills up what is less."""
_STEPS: Final = 9
"""Newest times of a step that count: the median of so few forgets a stall and follows a change."""
_VERDICTS: Final = 32
_BLIND: Final = 64
"""Rounds in a row in which verdicts came unseen, after which one is waited for."""
_SHARP: Final = 0.05
"""Bounds that are so near to each other, as a share of the wait, are as good as the time itself."""
_EARLY: Final = 0.25
"""Share of verdicts that come before the time that is reckoned with."""
_SMALLER: Final = 0.8
"""Assumed cost of a launch over that of a larger one, until it was tried."""


StepKind = Literal["draft", "score", "branch"]
_PASS: Final[tuple[StepKind, ...]] = ("score", "branch")


class DraftStep(NamedTuple):
    """What is run; how many of it is told apart."""

    method: DraftMethod
    kind: StepKind
    nodes: int
    """Most nodes of one of these drafts."""


class StepTimes:
    """Recent durations of steps, by step and size of the launch."""

    def __init__(self) -> None:
        self._seen: dict[DraftStep, dict[int, deque[float]]] = defaultdict(dict)

    def observe_step(self, step: DraftStep, count: int, seconds: float) -> None:
        """A step for `count` sessions or outcomes took so long."""
        sizes = self._seen[step]
        size = _size(step, count)
        if size not in sizes:
            sizes[size] = deque(maxlen=_STEPS)
        sizes[size].append(seconds)

    def reset_pass_times(self, step: DraftStep) -> None:
        """Scores and branches are tried anew; what they took was measured long ago."""
        for kind in _PASS:
            self._seen.pop(step._replace(kind=kind), None)

    def expected_s(self, step: DraftStep, count: int) -> float:
        """How long it will take. A size that was never tried is hoped to be no dearer than the next
        smaller one, or somewhat cheaper than the next larger: then it is tried, and known. Of a
        pass nothing is known at first but what a draft takes; 0.0 where that is not known."""
        sizes = self._seen.get(step)
        if not sizes:
            return 0.0 if step.kind == "draft" else self.expected_s(step._replace(kind="draft"), 1)
        size = _size(step, count)
        if size in sizes:
            return median(sizes[size])
        smaller = [other for other in sizes if other < size]
        if smaller:
            return median(sizes[max(smaller)])
        return _SMALLER * median(sizes[min(sizes)])


def _size(step: DraftStep, count: int) -> int:
    sizes = OUTCOME_BATCH_SIZES if step.kind == "branch" else SESSION_BUCKETS
    return sizes[min(bisect_left(sizes, count), len(sizes) - 1)]


class VerdictWait(NamedTuple):
    """Whose verdict is waited for, and since when."""

    connection: int
    follows_hit: bool
    """Whether since a verdict that was a hit, whose next round had begun; else since a draft
    left."""


@dataclass(slots=True)
class _Waits:
    """What was seen of one kind of wait."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_VERDICTS))
    blind: int = 0
    """Verdicts in a row of whose times only bounds were known."""


class VerdictArrivals:
    """Estimates when the next verdict comes after a draft or a hit: an early quantile.

    A message that came while the thread worked was found afterwards, so that only bounds of its
    time are known: it counts as the time between them that is nearest to the expected one. Counted
    as it was found, a pass that is too long would seem to end in time. The expected time may be
    wrong all the same, and nothing would show it as long as the thread works on: so it must stand
    back once in a while (`is_blind`).
    """

    def __init__(self) -> None:
        self._waits: dict[VerdictWait, _Waits] = {}

    def observe_arrival(self, wait: VerdictWait, least: float, most: float) -> None:
        """A verdict came so long after the wait began."""
        waits = self._waits.setdefault(wait, _Waits())
        if most - least > _SHARP * most:
            waits.blind += 1
        else:
            if waits.blind >= _BLIND:
                waits.seen.clear()
            waits.blind = 0
        expected = _early(waits.seen) if waits.seen else least
        waits.seen.append(min(max(expected, least), most))

    def expected_s(self, wait: VerdictWait) -> float:
        """How long it will be, rather too short; inf: nobody knows."""
        waits = self._waits.get(wait) or self._waits.get(wait._replace(follows_hit=False))
        return _early(waits.seen) if waits is not None else math.inf

    def exchange_latency_s(self, connection: int) -> float:
        """What a draft that is there before its verdict saves beside its making."""
        sent = self._waits.get(VerdictWait(connection, follows_hit=False))
        hit = self._waits.get(VerdictWait(connection, follows_hit=True))
        return max(_early(sent.seen) - _early(hit.seen), 0.0) if sent and hit else 0.0

    def is_blind(self, wait: VerdictWait, sessions: int) -> bool:
        """Whether a verdict of one of so many sessions should be waited for, to see its time."""
        waits = self._waits.get(wait)
        return waits is not None and waits.blind >= _BLIND * sessions

    def forget_connection(self, connection: int) -> None:
        """A connection ended."""
        for after_hit in (False, True):
            self._waits.pop(VerdictWait(connection, after_hit), None)


def _early(seen: deque[float]) -> float:
    return sorted(seen)[int(_EARLY * len(seen))]
