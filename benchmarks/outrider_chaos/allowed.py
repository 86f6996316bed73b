"""Which errors a client may hear under a schedule. Pure."""

from __future__ import annotations

from outrider.chaos.asks import Ask
from outrider.chaos.checker import Allowed, never
from outrider.chaos.faults import Phase, Role
from outrider.chaos.schedule import Schedule
from outrider.errors import OutriderError, UnavailableError


def allowed_errors(schedule: Schedule, ask: Ask, number: int) -> Allowed:
    """Errors that the request of this number may end with."""
    faults = [f for f in schedule.faults if f.role is not Role.CLIENT or f.index == number]
    if any(fault.role is not Role.DRAFTER for fault in faults):
        return _unavailable
    if any(fault.phase is Phase.DRAINING for fault in schedule.faults):
        return _unavailable
    return never


def _unavailable(error: OutriderError) -> bool:
    return isinstance(error, UnavailableError)
