"""OpenTelemetry spans of a request: the request, its queue waits and its sessions.

Attribute names follow OpenTelemetry's GenAI conventions where the conventions define one.
"""

from __future__ import annotations

from dataclasses import replace

from outrider import spans
from outrider.ids import RequestId, VerifierId
from outrider.spans import NO_SPAN, Attributes, RequestSpan
from outrider.wire.messages import SessionSpec
from outrider_router.requests.request import ValidatedRequest
from outrider_router.requests.running_requests import RequestEntry


def request_span(request_id: RequestId, traceparent: str) -> RequestSpan:
    """Start the span of a new request. `traceparent` is the W3C Trace Context that the client sent,
    or "".
    """
    about = {"gen_ai.response.id": request_id, "gen_ai.provider.name": "outrider"}
    return spans.start_span("outrider.request", traceparent, about, may_begin=True)


def describe_request(span: RequestSpan, job: ValidatedRequest) -> None:
    """Add the attributes of the request to its span."""
    if span.is_sampled:
        span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": job.model,
                "gen_ai.request.max_tokens": job.max_new_tokens,
                "gen_ai.request.temperature": job.sampling.temperature,
                "gen_ai.request.top_p": job.sampling.top_p,
                "gen_ai.usage.input_tokens": len(job.prompt_ids),
                "outrider.draft_method": job.plan.method.value,
                "outrider.priority": job.priority,
            }
        )


def queue_span(entry: RequestEntry, priority: int) -> RequestSpan:
    """Start the span of a wait in the queue."""
    return entry.span.child("outrider.queue", {"outrider.priority": priority})


def start_session_span(
    entry: RequestEntry, spec: SessionSpec, *, verifier_id: VerifierId
) -> tuple[RequestSpan, SessionSpec]:
    """Start the span of a request's new session. Return it with the session specification, to which
    the trace context is added so that the verifier's span becomes a child.
    """
    if not entry.span.is_sampled:
        return NO_SPAN, spec
    about: Attributes = {
        "outrider.session_id": spec.session_id,
        "outrider.verifier": verifier_id,
        "outrider.drafter": spec.drafter_id or "",
        "outrider.epoch": spec.epoch,
        "outrider.resumed_tokens": len(entry.output.token_ids),
    }
    span = entry.span.child("outrider.session", about)
    return span, replace(spec, traceparent=span.traceparent)


def end_request_span(entry: RequestEntry, outcome: str, error: Exception | None) -> None:
    """Add the result to the span of a request and end the span."""
    if not entry.span.is_sampled:
        return
    stats = entry.output.counters.to_stats()
    entry.span.set_attributes(
        {
            "gen_ai.usage.output_tokens": len(entry.output.token_ids),
            "gen_ai.response.finish_reasons": (outcome,),
            "outrider.rounds": stats.rounds,
            "outrider.draft_tokens": stats.proposed,
            "outrider.accepted_tokens": stats.accepted,
            "outrider.hit_rounds": stats.hit_rounds,
            "outrider.fallback_rounds": stats.fallback_rounds,
        }
    )
    if entry.output.first_token_at is not None:
        seconds = entry.output.first_token_at - entry.arrived_at
        entry.span.set_attributes({"gen_ai.response.time_to_first_chunk": seconds})
    entry.span.end(error)
