"""OpenTelemetry spans of traced sessions, with a sample of their drafts.

Drafts made before their verdicts have no span, because they belong to no round yet. Spans are
created when the metrics are written, after the proposals have been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider import spans
from outrider.spans import Attributes, RequestSpan, RoundTraceSampler
from outrider.wire.messages import SessionStart
from outrider_drafter.state.session import FollowedSession, SessionKey


@dataclass(slots=True, eq=False)
class _TracedDrafterSession:
    """Span and draft counts of a traced session."""

    span: RequestSpan
    sampling: RoundTraceSampler = field(default_factory=spans.round_sampling)
    drafts: int = 0
    nodes: int = 0


class DrafterSpans:
    """Spans of the traced sessions of a drafter. Used by the drafting thread only."""

    def __init__(self) -> None:
        self.traced: dict[SessionKey, _TracedDrafterSession] = {}
        """Traced sessions by key."""

    def start_span(self, key: SessionKey, start: SessionStart) -> None:
        """Start the span of a newly announced session, if its announcement carries a sampled
        trace."""
        if not start.traceparent:
            return
        about: Attributes = {
            "outrider.session_id": start.session_id,
            "outrider.epoch": start.epoch,
            "outrider.draft_method": start.plan.method.value,
        }
        span = spans.start_span("outrider.drafter.session", start.traceparent, about)
        if span.is_sampled:
            self.traced[key] = _TracedDrafterSession(span)

    def record_drafts(
        self,
        sessions: Sequence[FollowedSession],
        node_counts: NDArray[np.int64],
        seconds: float,
        now: float,
    ) -> None:
        """Record the proposals of a batch. `node_counts` [n]: draft tokens of each session's
        proposal; `seconds`: drafting time of the batch; `now`: wall-clock time in seconds when the
        batch was sent."""
        for session, nodes in zip(sessions, node_counts.tolist(), strict=True):
            traced = self.traced.get(session.key)
            if traced is None:
                continue
            traced.drafts += 1
            traced.nodes += nodes
            if traced.sampling.should_sample():
                about = {"outrider.draft_tokens": nodes, "outrider.batch": len(sessions)}
                draft = traced.span.child("outrider.draft", about, began=now - seconds)
                draft.end(at=now)

    def end_span(self, key: SessionKey, lost: str = "") -> None:
        """End the span of a session; idempotent. `lost`: reason why the session is no longer
        drafted, empty if it ended normally."""
        traced = self.traced.pop(key, None)
        if traced is None:
            return
        traced.span.set_attributes(
            {"outrider.drafts": traced.drafts, "outrider.draft_tokens": traced.nodes}
        )
        if lost:
            traced.span.event("session_lost", {"outrider.reason": lost})
        traced.span.end()
