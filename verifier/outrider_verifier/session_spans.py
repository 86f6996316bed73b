"""Spans of the sessions that their routers trace: the prompt, then rounds, thinned out.

Made of what leaves for the routers anyway, on the asyncio thread: the engine thread knows nothing
of them. A round's span lasts from the event before it to its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider import spans
from outrider.errors import OutriderError
from outrider.spans import Sampling, Span
from outrider.wire.messages import FALLBACK, HIT, LOOKED_AHEAD, PAUSED, REASONS, SessionSpec
from outrider_verifier.effects import Emits


@dataclass(slots=True, eq=False)
class _Traced:
    """A session that is traced."""

    span: Span
    last: float
    """Wall time of its newest event, seconds."""
    sampling: Sampling = field(default_factory=spans.round_sampling)
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class SessionSpans:
    """The traced sessions of a verifier, by ticket; asyncio thread only."""

    def __init__(self) -> None:
        self._traced: dict[int, _Traced] = {}

    def __bool__(self) -> bool:
        return bool(self._traced)

    def opened(self, ticket: int, spec: SessionSpec) -> None:
        """A router opens a session."""
        if not spec.traceparent:
            return
        span = spans.start(
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
        if span.sampled:
            self._traced[ticket] = _Traced(span, time.time())

    def emitted(self, batch: Emits) -> None:
        """Events of a round are about to leave."""
        now = time.time()
        for row, ticket in enumerate(batch.tickets):
            traced = self._traced.get(ticket)
            if traced is not None:
                self._saw(traced, batch, row, now)

    def ended(self, ticket: int, error: OutriderError | None = None) -> None:
        """A session is over, or its router has left it; idempotent."""
        traced = self._traced.pop(ticket, None)
        if traced is None:
            return
        traced.span.set(
            {
                "outrider.rounds": traced.rounds,
                "outrider.tokens": traced.tokens,
                "outrider.draft_tokens": traced.drafted,
                "outrider.accepted_tokens": traced.accepted,
            }
        )
        traced.span.end(error)

    def _saw(self, traced: _Traced, batch: Emits, row: int, now: float) -> None:
        began, traced.last = traced.last, now
        traced.tokens += batch.counts[row]
        flags, reason = batch.flags[row], REASONS[batch.reasons[row]]
        if reason is not None:
            traced.span.set({"outrider.finish_reason": reason.value})
        if not batch.round_ids[row]:
            about = {"outrider.tokens": batch.counts[row]}
            traced.span.child("outrider.prefill", about, began=began).end()
            return
        traced.rounds += 1
        traced.drafted += batch.proposed[row]
        traced.accepted += batch.accepted[row]
        if not traced.sampling.take():
            return
        traced.span.child(
            "outrider.round",
            {
                "outrider.round_id": batch.round_ids[row],
                "outrider.tokens": batch.counts[row],
                "outrider.draft_tokens": batch.proposed[row],
                "outrider.accepted_tokens": batch.accepted[row],
                "outrider.hit": bool(flags & HIT),
                "outrider.look_ahead": bool(flags & LOOKED_AHEAD),
                "outrider.fallback": bool(flags & FALLBACK),
                "outrider.paused": bool(flags & PAUSED),
            },
            began=began,
        ).end()
