"""Which errors a client may hear under a schedule. Pure."""

from __future__ import annotations

from outrider.chaos.checker import Allowed, never
from outrider.chaos.faults import Fault, Kind, Role
from outrider.chaos.requests import Ask
from outrider.chaos.schedule import Schedule
from outrider.errors import OutriderError, UnavailableError

_BREAKS = (Kind.KILL, Kind.TERMINATE, Kind.CUT)
"""What happens to a router and breaks the connections of its clients."""


def allowed_errors(schedule: Schedule, ask: Ask, number: int) -> Allowed:
    """Errors that the request of this number may end with.

    Whatever happens to drafters and verifiers, a keeper brings them back: none. A request that is
    not resumable dies with its connection; one that is dies with a router that could not write its
    journal.
    """
    faults = schedule.faults
    if not ask.resumable:
        breaks = any(_breaks(fault, number) for fault in faults)
        return _unavailable if breaks else never
    lost = any(fault.kind in _BREAKS and fault.role is Role.ROUTER for fault in faults)
    unwritten = any(fault.kind is Kind.DISK_FULL for fault in faults)
    return _unavailable if lost and unwritten else never


def _breaks(fault: Fault, number: int) -> bool:
    """Whether a fault ends the connection of a request."""
    if fault.role is Role.CLIENT:
        return fault.kind is Kind.CUT and fault.index == number
    return fault.role is Role.ROUTER and fault.kind in _BREAKS


def _unavailable(error: OutriderError) -> bool:
    return isinstance(error, UnavailableError)
