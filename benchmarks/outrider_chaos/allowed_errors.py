"""Errors that a client may receive under a schedule. Pure."""

from __future__ import annotations

from outrider.chaos.checker import AllowedError, allow_none
from outrider.chaos.faults import Fault, FaultKind, FaultRole
from outrider.chaos.requests import ChaosRequest
from outrider.chaos.schedule import FaultSchedule
from outrider.errors import OutriderError, UnavailableError

_BREAKS = (FaultKind.KILL, FaultKind.TERMINATE, FaultKind.CUT)
"""What happens to a router and breaks the connections of its clients."""


def allowed_errors_of(schedule: FaultSchedule, ask: ChaosRequest, number: int) -> AllowedError:
    """Errors that the request of this number may end with.

    Whatever happens to drafters and verifiers, a keeper brings them back: none. A request that is
    not resumable dies with its connection; one that is dies with a router that could not write its
    journal.
    """
    faults = schedule.faults
    if not ask.resumable:
        breaks = any(_breaks(fault, number) for fault in faults)
        return _unavailable if breaks else allow_none
    lost = any(fault.kind in _BREAKS and fault.role is FaultRole.ROUTER for fault in faults)
    unwritten = any(fault.kind is FaultKind.DISK_FULL for fault in faults)
    return _unavailable if lost and unwritten else allow_none


def _breaks(fault: Fault, number: int) -> bool:
    """Whether a fault ends the connection of a request."""
    if fault.role is FaultRole.CLIENT:
        return fault.kind is FaultKind.CUT and fault.index == number
    return fault.role is FaultRole.ROUTER and fault.kind in _BREAKS


def _unavailable(error: OutriderError) -> bool:
    return isinstance(error, UnavailableError)
