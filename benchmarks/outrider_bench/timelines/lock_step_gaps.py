"""Breakdown of the gaps between lock-step rounds, from timelines of a verifier and its drafter.

A gap is the time from the end of a verify forward to the start of the next one. In lock-step it
contains one batch of drafts and consists of consecutive steps. Gaps without drafts, with several
batches of drafts or with overlapping steps are left out. Gaps before rounds with prefill chunks are
not treated differently. Record the timelines with services that only run in lock-step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider_bench.report import format_table

Event = dict[str, Any]

STEPS: Final = (
    "settled",
    "told",
    "on its way",
    "taken in by the drafter",
    "staged",
    "drafted by the device",
    "answered",
    "sent",
    "on its way back",
    "taken in by the verifier",
    "planned",
    "launched",
)
"""Names of the steps of a gap, in order. Each step ends where the next one begins."""
DEVICE: Final = "drafted by the device"
"""The step in which the drafter's device works. It is the only one that is not part of the
exchange."""
MIN_GAPS: Final = 8
"""Minimum number of gaps with the same number of rows for which a median is computed."""
MIN_SHARE: Final = 0.1
"""Minimum share that the gaps with the same number of rows must have in all gaps. A closed loop
sometimes has rounds with fewer rows, which are thus left out."""
_VERIFIER, _DRAFTER = "verifier", "drafter"


@dataclass(frozen=True, slots=True)
class RoundGap:
    """One gap: the number of rows of the round after it, and the microseconds of each step in
    STEPS."""

    rows: int
    steps: tuple[float, ...]

    @property
    def exchange_us(self) -> float:
        """Microseconds of the gap, without the step in which the drafter's device works."""
        return sum(self.steps) - self.steps[STEPS.index(DEVICE)]


class _Spans:
    """Spans of one process that have the same name, in order of their start. Times are in
    microseconds."""

    def __init__(self, events: Sequence[Event], name: str) -> None:
        found = sorted(
            (event["ts"], event["ts"] + event["dur"], event["args"]["n"])
            for event in events
            if event["ph"] == "X" and event["name"] == name
        )
        self.all: list[tuple[float, float, int]] = found
        self._begins = [began for began, _, _ in found]

    def between(self, begin: float, end: float) -> list[tuple[float, float, int]]:
        """Return the spans that begin between two times."""
        first, last = bisect_left(self._begins, begin), bisect_right(self._begins, end)
        return self.all[first:last]

    def only(self, begin: float, end: float) -> tuple[float, float, int] | None:
        """Return the span that begins between two times; None if there is not exactly one."""
        found = self.between(begin, end)
        return found[0] if len(found) == 1 else None


def find_gaps(timelines: Sequence[Event]) -> list[RoundGap]:
    """Return the gaps between rounds of a verifier and its drafter on one host. Raises
    InvalidRequestError unless there is exactly one timeline of each."""
    sides = {timeline["otherData"]["process"]: timeline for timeline in timelines}
    if len(timelines) != 2 or set(sides) != {_VERIFIER, _DRAFTER}:
        raise InvalidRequestError(
            "gaps are those of one verifier and one drafter: give both timelines, and no others",
            reason="NO_PAIR",
        )
    return list(_gaps(sides[_VERIFIER]["traceEvents"], sides[_DRAFTER]["traceEvents"]))


def _gaps(verifier: Sequence[Event], drafter: Sequence[Event]) -> Iterator[RoundGap]:
    forwards = _Spans(verifier, "forward")
    tells, takes, plans, submits = (
        _Spans(verifier, name) for name in ("tell", "take in", "plan", "submit")
    )
    heard, drafts, device, sends = (
        _Spans(drafter, name) for name in ("take in", "draft", "device", "send")
    )
    if not device.all:
        # On a CPU nothing but the drafting is in a draft.
        device = drafts
    for (_, ended, _), (begins, _, rows) in pairwise(forwards.all):
        draft, worked = drafts.only(ended, begins), device.only(ended, begins)
        taken, sent = heard.only(ended, begins), sends.only(ended, begins)
        if draft is None or worked is None or taken is None or sent is None:
            continue
        told = tells.between(ended, taken[0])
        back = takes.between(sent[0], begins)
        planned = plans.between(back[-1][0], begins) if back else []
        submitted = submits.between(planned[-1][0], begins) if planned else []
        if not told or not submitted:
            continue
        moments = (
            ended,
            *(told[0][0], told[0][1]),
            *(taken[0], draft[0], worked[0], worked[1], draft[1], sent[1]),
            *(back[-1][0], planned[-1][0], submitted[-1][0]),
            begins,
        )
        steps = tuple(after - before for before, after in pairwise(moments))
        if rows and min(steps) >= 0.0:
            yield RoundGap(rows, steps)


def group_by_rows(gaps: Sequence[RoundGap]) -> dict[int, list[RoundGap]]:
    """Return the gaps by the number of rows of their rounds, in ascending order. Numbers of rows
    with too few gaps are left out."""
    enough = max(MIN_GAPS, MIN_SHARE * len(gaps))
    counts = sorted({gap.rows for gap in gaps})
    each = {count: [gap for gap in gaps if gap.rows == count] for count in counts}
    return {count: found for count, found in each.items() if len(found) >= enough}


def exchange_us(gaps: Sequence[RoundGap]) -> dict[str, int]:
    """Return the figure `exchange_us` of service.json: the median microseconds of the exchange, by
    the number of rows of a round."""
    return {
        str(rows): round(median(gap.exchange_us for gap in found))
        for rows, found in group_by_rows(gaps).items()
    }


def describe_gaps(gaps: Sequence[RoundGap]) -> str:
    """Return a table of the median microseconds of each step, by the number of rows of a round.

    Raises InvalidRequestError if there are too few lock-step rounds with the same number of rows.
    """
    found = group_by_rows(gaps)
    if not found:
        raise InvalidRequestError(
            f"of {len(gaps)} rounds in lock-step (`bench serve --look-ahead 0`) in these timelines "
            f"no {MIN_GAPS} have as many rows",
            reason="NO_EVENTS",
        )
    exchange = exchange_us(gaps)
    rows: list[list[object]] = [
        [step, *(round(median(gap.steps[place] for gap in those)) for those in found.values())]
        for place, step in enumerate(STEPS)
    ]
    whole = [round(median(sum(gap.steps) for gap in those)) for those in found.values()]
    rows.append(["**the whole gap**", *whole])
    rows.append(["**exchange**, all but the device", *exchange.values()])
    rows.append(["rounds", *(len(those) for those in found.values())])
    return format_table(["us, median", *(f"{count} rows" for count in found)], rows)
