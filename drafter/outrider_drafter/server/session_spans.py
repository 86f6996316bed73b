"""OpenTelemetry spans of traced sessions, with a sample of their drafts.

Drafts made ahead of their verdicts have no span: they belong to no round yet. Spans are made when
the metrics are written, after the proposals have left.
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
    """A session that is traced."""

    span: RequestSpan
    sampling: RoundTraceSampler = field(default_factory=spans.round_sampling)
    drafts: int = 0
    nodes: int = 0


class DrafterSpans:
    """Traced sessions of a drafter; drafting thread only."""

    def __init__(self) -> None:
        self.traced: dict[SessionKey, _TracedDrafterSession] = {}
        """Sessions that are traced."""

    def start_span(self, key: SessionKey, start: SessionStart) -> None:
        """A verifier announces a session."""
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
        """Proposals that took so long have left at the wall time `now`, in seconds."""
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
        """A session is over, or no longer drafted (then `lost` says why); idempotent."""
        traced = self.traced.pop(key, None)
        if traced is None:
            return
        traced.span.set_attributes(
            {"outrider.drafts": traced.drafts, "outrider.draft_tokens": traced.nodes}
        )
        if lost:
            traced.span.event("session_lost", {"outrider.reason": lost})
        traced.span.end()
