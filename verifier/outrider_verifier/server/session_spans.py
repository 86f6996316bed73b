"""OpenTelemetry spans of traced sessions: one for the prompt, then one for each sampled round.

The asyncio thread creates the spans from the events that are sent to routers, so they cost the
engine thread no time. The span of a round lasts from the session's previous event to the event of
the round.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider import spans
from outrider.errors import OutriderError
from outrider.spans import RequestSpan, RoundTraceSampler
from outrider.wire.messages import (
    FALLBACK,
    LOOK_AHEAD_HIT,
    LOOKED_AHEAD,
    PAUSED,
    REASONS,
    SessionSpec,
)
from outrider_verifier.state.effects import EventBatch, SessionEventRow


@dataclass(slots=True, eq=False)
class _TracedVerifierSession:
    """Span of one traced session, and the totals that are recorded when it ends."""

    span: RequestSpan
    last: float
    """Time of the session's newest event, as a Unix time in seconds."""
    sampling: RoundTraceSampler = field(default_factory=spans.round_sampling)
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class VerifierSpans:
    """Spans of the traced sessions of a verifier. Asyncio thread only."""

    def __init__(self) -> None:
        self.traced: dict[int, _TracedVerifierSession] = {}
        """Traced sessions by ticket."""

    def start_span(self, ticket: int, spec: SessionSpec) -> None:
        """Start the span of a session that a router opens. Does nothing if the session's trace is
        not sampled."""
        if not spec.traceparent:
            return
        span = spans.start_span(
            "outrider.verifier.session",
            spec.traceparent,
            {
                "outrider.session_id": spec.session_id,
                "outrider.epoch": spec.epoch,
                "outrider.prefix_tokens": len(spec.token_ids),
                "outrider.drafter": spec.drafter_id or "",
                "outrider.rule": spec.sampling.effective_rule.value,
            },
        )
        if span.is_sampled:
            self.traced[ticket] = _TracedVerifierSession(span, time.time())

    def record_events(self, batch: EventBatch) -> None:
        """Record the events of a round before they are sent to routers."""
        now = time.time()
        for event in batch.iter_events():
            traced = self.traced.get(event.ticket)
            if traced is not None:
                self._saw(traced, event, now)

    def end_span(self, ticket: int, error: OutriderError | None = None) -> None:
        """End the span of a session that has ended or that its router has left; idempotent."""
        traced = self.traced.pop(ticket, None)
        if traced is None:
            return
        traced.span.set_attributes(
            {
                "outrider.rounds": traced.rounds,
                "outrider.tokens": traced.tokens,
                "outrider.draft_tokens": traced.drafted,
                "outrider.accepted_tokens": traced.accepted,
            }
        )
        traced.span.end(error)

    def _saw(self, traced: _TracedVerifierSession, event: SessionEventRow, now: float) -> None:
        began, traced.last = traced.last, now
        traced.tokens += event.num_tokens
        flags, reason = event.flags, REASONS[event.reason]
        if reason is not None:
            traced.span.set_attributes({"outrider.finish_reason": reason.value})
        if not event.round_id:
            about = {"outrider.tokens": event.num_tokens}
            traced.span.child("outrider.prefill", about, began=began).end()
            return
        traced.rounds += 1
        traced.drafted += event.proposed
        traced.accepted += event.accepted
        if not traced.sampling.should_sample():
            return
        traced.span.child(
            "outrider.round",
            {
                "outrider.round_id": event.round_id,
                "outrider.tokens": event.num_tokens,
                "outrider.draft_tokens": event.proposed,
                "outrider.accepted_tokens": event.accepted,
                "outrider.hit": bool(flags & LOOK_AHEAD_HIT),
                "outrider.look_ahead": bool(flags & LOOKED_AHEAD),
                "outrider.fallback": bool(flags & FALLBACK),
                "outrider.paused": bool(flags & PAUSED),
            },
            began=began,
        ).end()
