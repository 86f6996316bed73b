"""Failover policy: retry, finish or fail a request whose session was lost. Pure.

A request continues in another session, from all that it has emitted, unless the fault is its own or
too many sessions in a row were lost. It is unknown which session crashed a verifier: all sessions
on it are blamed, so blame is a bound on attempts and nothing more.
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
"""Refusals of one request by verifiers on which nothing else of ours runs."""
DRAINING = "DRAINING"
"""Reason of errors: the verifier is about to stop."""
FINAL_REASONS = ("DEVICE_LOST", "ENGINE_STALLED", "STOPPING")
"""Reasons of errors: the verifier serves nobody any more."""
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHistory:
    """Failures and progress of a request so far."""

    losses: int = 0
    """Sessions of it that were lost or failed."""
    refusals: int = 0
    """Sessions of it that found no room."""
    emitted: int = 0
    """Tokens of its text so far."""
    is_alone: bool = False
    """Whether its verifier has no other session of this router."""
    is_in_time: bool = True
    """Whether the time that a failover may take is not over."""


def failover_cause(error: OutriderError) -> FailoverCause | None:
    """Why a session with this error is opened again; None: it would meet the same error."""
    if isinstance(error, ResourceExhaustedError):
        return FailoverCause.REFUSED
    if isinstance(error, UnavailableError):
        return FailoverCause.DRAINING if error.reason == DRAINING else FailoverCause.VERIFIER_LOST
    if isinstance(error, InternalError):
        # Another session would run the same prefix through the same model.
        return None if error.reason == MODEL_OUTPUT_INVALID else FailoverCause.FAILED
    return None


def should_retry(cause: FailoverCause | None, past: RequestHistory, *, max_failovers: int) -> bool:
    """Whether a request goes on in another session; `past` counts the one that just ended."""
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
    """How long to wait after a loss before a place is asked for: not at all after the first."""
    if losses <= 1:
        return 0.0
    return min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(losses - 2, 10))


def implied_finish(
    emitted: list[int], *, stop_ids: tuple[int, ...], max_new_tokens: int
) -> FinishReason | None:
    """The end that a text has come to, whoever could not say so any more; None: it goes on.

    A stop token before its time is never emitted, so the last one tells.
    """
    if emitted and emitted[-1] in stop_ids:
        return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if len(emitted) >= max_new_tokens else None


def incomplete_error(cause: FailoverCause, past: RequestHistory) -> UnavailableError:
    """The error of a request that nobody serves any more."""
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
