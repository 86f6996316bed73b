"""Label values of metrics: reasons of failovers, session moves and drafter quarantines, and
outcomes of forwarded streams.
"""

from __future__ import annotations

from enum import StrEnum


class FailoverCause(StrEnum):
    """Reason for which a request is continued in another session."""

    VERIFIER_LOST = "verifier_lost"
    DRAINING = "draining"
    FAILED = "failed"
    """The verifier ended the session with an error and continues to serve."""
    REFUSED = "refused"
    """The verifier had no capacity for the session."""
    ROUTER_LOST = "router_lost"
    """The router that served the request ended."""


class MoveReason(StrEnum):
    """Reason for which a session moves to another drafter."""

    LOST = "lost"
    """The session's drafter was lost, or the session had none."""
    DRAINED = "drained"
    """The session's drafter is being removed or is about to stop."""
    QUARANTINED = "quarantined"
    """The session's drafter was quarantined."""
    PROBE = "probe"
    """The session tests whether a quarantined drafter works again."""
    BALANCE = "balance"
    """Sessions are spread more evenly over the drafters."""


class QuarantineReason(StrEnum):
    """Fault for which a drafter is quarantined."""

    SLOW = "slow"
    """The drafter's proposals arrive too late."""
    SILENT = "silent"
    """The drafter sends no proposals."""
    WRONG = "wrong"
    """The drafter sends invalid messages."""


class ForwardOutcome(StrEnum):
    """Outcome of a search for a resumable request on the other routers of the fleet."""

    FOUND = "found"
    NOT_FOUND = "not_found"
    UNREACHABLE = "unreachable"
    """No router has the request, but at least one did not answer."""
