"""Which errors a client may hear under a schedule. Pure."""

from __future__ import annotations

from outrider.chaos.asks import Ask
from outrider.chaos.checker import Allowed, never
from outrider.chaos.faults import Kind, Role
from outrider.chaos.schedule import Schedule
from outrider.errors import OutriderError, UnavailableError


def allowed_errors(schedule: Schedule, ask: Ask, number: int) -> Allowed:
    """Errors that the request of this number may end with.

    Whatever happens to drafters and verifiers, a keeper brings them back: none. A request that is
    not resumable dies with its stream.
    """
    for fault in schedule.faults:
        own = fault.role is Role.CLIENT and fault.kind is Kind.CUT and fault.index == number
        if own or fault.role is Role.ROUTER:
            return _unavailable
    return never


def _unavailable(error: OutriderError) -> bool:
    return isinstance(error, UnavailableError)
