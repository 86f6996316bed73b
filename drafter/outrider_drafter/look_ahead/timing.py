"""What the steps of a drafter take, and when verdicts come: measured, by what they depend on.

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
from outrider_drafter.state.outcomes import BRANCH_SIZES

SESSION_SIZES: Final = (1, 4, 8, 16, 32, 64)
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


Kind = Literal["draft", "score", "branch"]
_PASS: Final[tuple[Kind, ...]] = ("score", "branch")


class Step(NamedTuple):
    """What is run; how many of it is told apart."""

    method: DraftMethod
    kind: Kind
    nodes: int
    """Most nodes of one of these drafts."""


class StepTimes:
    """How long steps took of late, by step and size of the launch."""

    def __init__(self) -> None:
        self._seen: dict[Step, dict[int, deque[float]]] = defaultdict(dict)

    def saw(self, step: Step, count: int, seconds: float) -> None:
        """A step for `count` sessions or outcomes took so long."""
        sizes = self._seen[step]
        size = _size(step, count)
        if size not in sizes:
            sizes[size] = deque(maxlen=_STEPS)
        sizes[size].append(seconds)

    def forget_pass(self, step: Step) -> None:
        """Scores and branches are tried anew; what they took was measured long ago."""
        for kind in _PASS:
            self._seen.pop(step._replace(kind=kind), None)

    def expect(self, step: Step, count: int) -> float:
        """How long it will take. A size that was never tried is hoped to be no dearer than the next
        smaller one, or somewhat cheaper than the next larger: then it is tried, and known. Of a
        pass nothing is known at first but what a draft takes; 0.0 where that is not known."""
        sizes = self._seen.get(step)
        if not sizes:
            return 0.0 if step.kind == "draft" else self.expect(step._replace(kind="draft"), 1)
        size = _size(step, count)
        if size in sizes:
            return median(sizes[size])
        smaller = [other for other in sizes if other < size]
        if smaller:
            return median(sizes[max(smaller)])
        return _SMALLER * median(sizes[min(sizes)])


def _size(step: Step, count: int) -> int:
    sizes = BRANCH_SIZES if step.kind == "branch" else SESSION_SIZES
    return sizes[min(bisect_left(sizes, count), len(sizes) - 1)]


class Wait(NamedTuple):
    """Whose verdict is waited for, and since when."""

    connection: int
    after_hit: bool
    """Whether since a verdict that was a hit, whose next round had begun; else since a draft
    left."""


@dataclass(slots=True)
class _Waits:
    """What was seen of one kind of wait."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=_VERDICTS))
    blind: int = 0
    """Verdicts in a row of whose times only bounds were known."""


class Arrivals:
    """How long after a draft, or after a hit, the next verdict comes: early ones of late.

    A message that came while the thread worked was found afterwards, so that only bounds are known
    of its time: it counts as the time between them that is nearest to what was expected. Counted
    as it was found, a pass that is too long would seem to end in time. What was expected may be
    wrong all the same, and nothing would tell as long as the thread works on: so it must stand back
    once in a while (`is_blind`).
    """

    def __init__(self) -> None:
        self._waits: dict[Wait, _Waits] = {}

    def saw(self, wait: Wait, least: float, most: float) -> None:
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

    def expect(self, wait: Wait) -> float:
        """How long it will be, rather too short; inf: nobody knows."""
        waits = self._waits.get(wait) or self._waits.get(wait._replace(after_hit=False))
        return _early(waits.seen) if waits is not None else math.inf

    def exchange(self, connection: int) -> float:
        """What a draft that is there before its verdict saves beside its making."""
        sent = self._waits.get(Wait(connection, after_hit=False))
        hit = self._waits.get(Wait(connection, after_hit=True))
        return max(_early(sent.seen) - _early(hit.seen), 0.0) if sent and hit else 0.0

    def is_blind(self, wait: Wait, sessions: int) -> bool:
        """Whether a verdict of one of so many sessions should be waited for, to see its time."""
        waits = self._waits.get(wait)
        return waits is not None and waits.blind >= _BLIND * sessions

    def forget(self, connection: int) -> None:
        """A connection ended."""
        for after_hit in (False, True):
            self._waits.pop(Wait(connection, after_hit), None)


def _early(seen: deque[float]) -> float:
    return sorted(seen)[int(_EARLY * len(seen))]
