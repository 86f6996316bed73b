"""Failover policy: retry, finish or fail a request whose session was lost. Pure.

A request continues in another session, from all tokens that it has emitted, unless the error would
occur again or too many of its sessions were lost. It is unknown which session crashed a verifier,
so a crash counts as a loss for every session on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import (
    MODEL_OUTPUT_INVALID,
    InternalError,
    OutriderError,
    ResourceExhaustedError,
    UnavailableError,
)
from outrider.wire.messages import FinishReason
from outrider_router.base.reasons import FailoverCause

MAX_REFUSALS = 20
"""Number of times that verifiers may refuse one request although they have no other session of this
router.
"""
DRAINING = "DRAINING"
"""Reason of the error with which a verifier that is about to stop ends its sessions."""
FINAL_REASONS = ("DEVICE_LOST", "ENGINE_STALLED", "STOPPING")
"""Reasons of the errors with which a verifier ends its sessions when it no longer serves any."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHistory:
    """Failures and progress of a request so far."""

    losses: int = 0
    """Number of the request's sessions that were lost or failed."""
    refusals: int = 0
    """Number of the request's sessions that verifiers refused for lack of capacity."""
    emitted: int = 0
    """Number of tokens emitted so far."""
    is_alone: bool = False
    """Whether the request's verifier has no other session of this router."""
    is_in_time: bool = True
    """Whether the time limit of a failover has not yet passed."""


def failover_cause(error: OutriderError) -> FailoverCause | None:
    """Return the reason for which a request continues after its session ended with `error`, or None
    if a new session would have the same error.
    """
    if isinstance(error, ResourceExhaustedError):
        return FailoverCause.REFUSED
    if isinstance(error, UnavailableError):
        return FailoverCause.DRAINING if error.reason == DRAINING else FailoverCause.VERIFIER_LOST
    if isinstance(error, InternalError):
        # Another session would run the same prefix through the same model.
        return None if error.reason == MODEL_OUTPUT_INVALID else FailoverCause.FAILED
    return None


def should_retry(cause: FailoverCause | None, past: RequestHistory, *, max_failovers: int) -> bool:
    """Return whether a request continues in another session. `past` includes the session that just
    ended.
    """
    match cause:
        case None:
            return False
        case FailoverCause.REFUSED:
            return not past.is_alone or past.refusals < MAX_REFUSALS
        case FailoverCause.DRAINING | FailoverCause.ROUTER_LOST:
            return past.is_in_time
        case FailoverCause.VERIFIER_LOST | FailoverCause.FAILED:
            return past.is_in_time and past.losses <= max_failovers


def pause_s(losses: int) -> float:
    """Return the pause in seconds before a request that has lost `losses` sessions is queued again.
    After the first loss it is 0.
    """
    if losses <= 1:
        return 0.0
    return min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(losses - 2, 10))


def implied_finish(
    emitted: list[int], *, stop_ids: tuple[int, ...], max_new_tokens: int
) -> FinishReason | None:
    """Return the finish reason that the emitted tokens show even if the verifier has not reported
    it: a stop token or the length limit was reached. Return None if the output continues.

    A stop token is emitted only at the end, so the last token decides.
    """
    if emitted and emitted[-1] in stop_ids:
        return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if len(emitted) >= max_new_tokens else None


def incomplete_error(cause: FailoverCause, past: RequestHistory) -> UnavailableError:
    """Return the error of a request whose output is incomplete, because no verifier continued it in
    time.
    """
    why = {
        FailoverCause.VERIFIER_LOST: "its verifier was lost",
        FailoverCause.DRAINING: "its verifier stopped",
        FailoverCause.ROUTER_LOST: "its router was restarted",
    }.get(cause, "its session failed")
    if past.losses > 1:
        why += f" ({past.losses} times so far)"
    return UnavailableError(
        f"{why} and no other one took the request over in time; the answer is incomplete after "
        f"{past.emitted} tokens",
        reason="VERIFIER_LOST",
    )
