"""Trace propagation: makes the spans of a request children of the calling program's span.

OpenTelemetry is not needed here. A program that uses it has imported it; one that has not, has no
span to be a child of.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from outrider.client.rpcs import Metadata

_MODULE: Final = "opentelemetry.trace"
TRACEPARENT: Final = "traceparent"
"""Key of W3C's Trace Context."""


def add_trace_metadata(metadata: Metadata) -> Metadata:
    """Metadata of a request with the current span's context, where there is one and the metadata
    names none."""
    trace: Any = sys.modules.get(_MODULE)
    if trace is None or any(key == TRACEPARENT for key, _ in metadata):
        return metadata
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return metadata
    header = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"
    return (*metadata, (TRACEPARENT, header))
