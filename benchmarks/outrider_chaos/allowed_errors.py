"""Errors that a client may receive under a schedule of faults."""

from __future__ import annotations

from outrider.chaos.checker import AllowedError, allow_none
from outrider.chaos.faults import Fault, FaultKind, FaultRole
from outrider.chaos.requests import ChaosRequest
from outrider.chaos.schedule import FaultSchedule
from outrider.errors import OutriderError, UnavailableError

_BREAKS = (FaultKind.KILL, FaultKind.TERMINATE, FaultKind.CUT)
"""Faults of a router that break the connections of its clients."""


def allowed_errors_of(schedule: FaultSchedule, ask: ChaosRequest, number: int) -> AllowedError:
    """Return a function that states which errors are allowed for the request `ask` with this
    number.

    Faults of drafters and verifiers must not fail a request, because another process takes over or
    the process is restarted. A request that is not resumable may fail with UnavailableError if a
    fault breaks its connection. A resumable request may do so only if the router's connections
    break and the router could not write its journal.
    """
    faults = schedule.faults
    if not ask.resumable:
        breaks = any(_breaks(fault, number) for fault in faults)
        return _unavailable if breaks else allow_none
    lost = any(fault.kind in _BREAKS and fault.role is FaultRole.ROUTER for fault in faults)
    unwritten = any(fault.kind is FaultKind.DISK_FULL for fault in faults)
    return _unavailable if lost and unwritten else allow_none


def _breaks(fault: Fault, number: int) -> bool:
    """Return whether a fault breaks the connection of the request with this number."""
    if fault.role is FaultRole.CLIENT:
        return fault.kind is FaultKind.CUT and fault.index == number
    return fault.role is FaultRole.ROUTER and fault.kind in _BREAKS


def _unavailable(error: OutriderError) -> bool:
    return isinstance(error, UnavailableError)
