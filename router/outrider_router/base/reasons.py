"""Reasons of failovers, session moves and drafter quarantines: label values of metrics."""

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
    """The drafter of the session is lost, or the session never had one."""
    DRAINED = "drained"
    """The drafter of the session is being removed, or is about to stop."""
    QUARANTINED = "quarantined"
    """The drafter of the session was quarantined."""
    PROBE = "probe"
    """The session tests whether a quarantined drafter works again."""
    BALANCE = "balance"
    """The sessions are spread more evenly over the drafters."""


class QuarantineReason(StrEnum):
    """Fault for which a drafter is quarantined."""

    SLOW = "slow"
    """Its proposals arrive too late."""
    SILENT = "silent"
    """It sends no proposals."""
    WRONG = "wrong"
    """It sends invalid messages."""
