"""An OpenTelemetry collector in this process: what the real exporter sends, by span name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)


@dataclass(frozen=True, kw_only=True)
class Received:
    """A span as it came over the wire."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """ "" of a root."""
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool
    began: int
    ended: int
    """Nanoseconds since the epoch."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Implements OTLP's trace service."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.address = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for group in request.resource_spans:
                service = _values(group.resource.attributes)["service.name"]
                for scope in group.scope_spans:
                    self._spans += [_received(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, name: str = "") -> list[Received]:
        """Those that have come, of this name if one is given; oldest first."""
        with self._lock:
            found = [span for span in self._spans if name in ("", span.name)]
        return sorted(found, key=lambda span: span.began)

    def wait(self, check: Callable[[], Any], timeout_s: float = 30.0) -> None:
        """Wait until `check()` is true."""
        end = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < end, f"only {[span.name for span in self.spans()]} came"
            time.sleep(0.02)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of the loopback interface."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def _received(service: str, span: Any) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=_values(span.attributes),
        events=tuple(event.name for event in span.events),
        failed=span.status.code == 2,
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
    )
