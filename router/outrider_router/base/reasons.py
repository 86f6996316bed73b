"""Reasons of failovers, session moves and drafter quarantines: label values of metrics."""

from __future__ import annotations

from enum import StrEnum


class FailoverCause(StrEnum):
    """Reason for which a request is continued in another session."""

    VERIFIER_LOST = "verifier_lost"
    DRAINING = "draining"
    FAILED = "failed"
    """The verifier failed the session and lives on."""
    REFUSED = "refused"
    """The verifier had no room."""
    ROUTER_LOST = "router_lost"
    """The request is one of a router that ended."""


class MoveReason(StrEnum):
    """Reason for which a session moves to another drafter."""

    LOST = "lost"
    """Its drafter is gone, or it never had one."""
    DRAINED = "drained"
    """Its drafter is being removed, or is about to stop."""
    QUARANTINED = "quarantined"
    """Its drafter is slow, silent or wrong."""
    PROBE = "probe"
    """Such a drafter is given one to see whether it is well again."""
    BALANCE = "balance"


class QuarantineReason(StrEnum):
    """Fault for which a drafter is quarantined."""

    SLOW = "slow"
    SILENT = "silent"
    WRONG = "wrong"
