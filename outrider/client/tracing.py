"""Trace propagation: makes the spans of a request children of the calling program's span.

OpenTelemetry need not be installed. If the program has not imported OpenTelemetry, it has no span
that could be the parent.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from outrider.client.rpcs import Metadata

_MODULE: Final = "opentelemetry.trace"
TRACEPARENT: Final = "traceparent"
"""Metadata key that carries the W3C Trace Context."""


def add_trace_metadata(metadata: Metadata) -> Metadata:
    """Return the metadata with the trace context of the current span. Return it unchanged if there
    is no current span, or if it already has a trace context."""
    trace: Any = sys.modules.get(_MODULE)
    if trace is None or any(key == TRACEPARENT for key, _ in metadata):
        return metadata
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return metadata
    header = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    return (*metadata, (TRACEPARENT, header))
