"""Greedy minimisation of a failing schedule."""

from __future__ import annotations

from collections.abc import Callable

from outrider.chaos.schedule import FaultSchedule


def shrink_schedule(
    schedule: FaultSchedule, fails: Callable[[FaultSchedule], bool]
) -> FaultSchedule:
    """Remove faults and requests one by one as long as `fails` is true for the rest. Return the
    smallest schedule found."""
    smaller = True
    while smaller:
        smaller = False
        for index in reversed(range(len(schedule.faults))):
            candidate = schedule.without(index)
            if fails(candidate):
                schedule, smaller = candidate, True
        for index in reversed(range(len(schedule.asks))):
            if len(schedule.asks) > 1 and fails(candidate := schedule.without_ask(index)):
                schedule, smaller = candidate, True
    return schedule
