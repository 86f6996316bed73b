"""Accounting of a finished request: metrics, log line and span."""

from __future__ import annotations

import logging

from outrider.errors import InternalError, OutriderError
from outrider_router.base.metrics import RouterMetrics
from outrider_router.requests.request_spans import end_request_span
from outrider_router.requests.running_requests import RequestEntry

logger = logging.getLogger(__name__)


def log_request_end(
    entry: RequestEntry, outcome: str, problem: Exception | None, metrics: RouterMetrics, now: float
) -> None:
    """Record the end of a request in metrics, log and trace.

    `now` is the clock time in seconds, and `outcome` is the finish reason or the error code. The
    message of an InternalError is logged at level ERROR.
    """
    duration_s, output = now - entry.arrived_at, entry.output
    num_tokens = len(output.token_ids)
    metrics.record_request_end(
        outcome, output.first_token_at, output.last_token_at, num_tokens, duration_s
    )
    failure = {"reason": problem.reason} if isinstance(problem, OutriderError) else {}
    level = logging.INFO
    if isinstance(problem, InternalError):
        # Messages of other errors may quote input of the client.
        level = logging.ERROR
        failure["problem"] = problem.message
    logger.log(
        level,
        "request ended",
        extra={
            **entry.log_ids,
            "outcome": outcome,
            **failure,
            "tokens": num_tokens,
            "duration_ms": round(duration_s * 1000, 1),
            "rounds": output.counters.rounds,
            "fallback_rounds": output.counters.fallback_rounds,
        },
    )
    end_request_span(entry, outcome, problem)
