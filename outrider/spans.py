"""OpenTelemetry tracing: spans of sampled requests across router, verifier and drafter.

Timelines (`outrider.timeline`), in contrast, record all work of one process. The router starts a
span for each sampled request and passes its W3C `traceparent` to verifier and drafter, whose spans
become its children. A request that is not sampled has the span `NO_SPAN`, whose methods do nothing.
Engine threads never create spans.

OpenTelemetry is optional (`pip install outrider[trace]`) and imported only if an endpoint is
configured. A background thread exports the spans; those that the collector does not accept in time
are dropped.
"""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import outrider
from outrider.errors import FailedPreconditionError, OutriderError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

MAX_HEADER_CHARS = 128
"""Maximum length of a client's `traceparent`; longer values are ignored."""
_FLUSH_S = 3.0
"""Maximum time that an ending process waits for the collector, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Configuration of span export; keys of the table `[tracing]`."""

    otlp_endpoint: str = ""
    """OTLP collector (gRPC): http://HOST:PORT, https://HOST:PORT or HOST:PORT (without TLS); ""
    disables tracing."""
    sample_ratio: float = 1.0
    """Share of the requests without a client's trace context that are traced; only the router uses
    it."""
    rounds: int = 64
    """Number of rounds (or of drafts, on a drafter) of a session that get a span each, before
    sampling begins: every second one after that, every fourth one after as many spans again, and so
    on."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError(f"tracing.sample_ratio must be in [0, 1], got {self.sample_ratio}")
        if self.rounds < 1:
            raise ValueError(f"tracing.rounds must be >= 1, got {self.rounds}")


def add_tracing_flags(parser: ArgumentParser) -> None:
    """Add the command-line flags for the configuration table `tracing` to a parser."""
    add = parser.add_argument
    add(
        "--otlp-endpoint",
        metavar="URL",
        dest="tracing.otlp_endpoint",
        help="OpenTelemetry collector to which request traces are sent by OTLP over gRPC.",
    )
    add(
        "--trace-ratio",
        type=float,
        metavar="R",
        dest="tracing.sample_ratio",
        help="Fraction of requests to trace if the client does not decide.",
    )


class RequestSpan:
    """Span of a traced request, or placeholder for a request that is not traced. The methods of a
    placeholder do nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: OtelSpan | None) -> None:
        self._span = span

    @property
    def is_sampled(self) -> bool:
        """Whether the request is traced."""
        return self._span is not None

    @property
    def trace_id(self) -> str:
        """Trace id for logs, 32 hexadecimal digits; empty for a placeholder."""
        return "" if self._span is None else f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` that makes spans of other processes children of this span; empty for a
        placeholder."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def child(
        self, name: str, attributes: Attributes | None = None, *, began: float | None = None
    ) -> RequestSpan:
        """Start a child span and return it. `began` is its start as wall-clock time in seconds;
        None means now."""
        if self._span is None or _exporter is None:
            return NO_SPAN
        from opentelemetry.trace import set_span_in_context

        start = _exporter.tracer.start_span(
            name,
            set_span_in_context(self._span),
            attributes=dict(attributes or {}),
            start_time=None if began is None else round(began * 1e9),
        )
        return RequestSpan(start)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event to the span, at the current time."""
        if self._span is not None:
            self._span.add_event(name, dict(attributes or {}))

    def set_attributes(self, attributes: Attributes) -> None:
        """Set attributes of the span."""
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def end(self, error: BaseException | None = None, *, at: float | None = None) -> None:
        """End the span; idempotent.

        `error` is the error with which the span's work failed, or None. `at` is the end as
        wall-clock time in seconds; None means now.
        """
        if self._span is None or not self._span.is_recording():
            return
        if error is not None:
            from opentelemetry.trace import StatusCode

            code = error.code if isinstance(error, OutriderError) else type(error).__name__
            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end(None if at is None else round(at * 1e9))

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A client that leaves closes the generators that serve it: no error of theirs.
        self.end(None if kind is GeneratorExit else error)


NO_SPAN = RequestSpan(None)
"""Span of all requests that are not traced."""


class RoundTraceSampler:
    """Selects the rounds of one session that get a span. The longer the session, the fewer rounds
    it selects."""

    __slots__ = ("_left", "_most", "_stride", "_until")

    def __init__(self, most: int) -> None:
        """Create a sampler. It selects every round until it has selected `most` rounds, then every
        second round for the next `most` selections, then every fourth round, and so on."""
        self._most = self._left = most
        self._stride = self._until = 1

    def should_sample(self) -> bool:
        """Return whether the next round gets a span."""
        self._until -= 1
        if self._until:
            return False
        self._left -= 1
        if not self._left:
            self._left, self._stride = self._most, 2 * self._stride
        self._until = self._stride
        return True


class _Exporter:
    """Exporter of the spans of one process."""

    def __init__(self, config: TracingConfig, service: str, instance: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError as error:
            raise FailedPreconditionError(
                f"tracing.otlp_endpoint is set, but {error.name} is not installed: "
                "pip install 'outrider[trace]'",
                reason="NO_OPENTELEMETRY",
            ) from error
        resource = Resource.create(
            {
                "service.name": service,
                "service.namespace": "outrider",
                "service.version": outrider.__version__,
                "service.instance.id": instance,
            }
        )
        self.rounds = config.rounds
        self.provider: TracerProvider = TracerProvider(
            resource=resource,
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            shutdown_on_exit=False,
        )
        secure = config.otlp_endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=not secure)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer: Tracer = self.provider.get_tracer("outrider", outrider.__version__)

    def close(self) -> None:
        """Send the remaining spans, with a limit on the wait for an unreachable collector."""
        ending = threading.Thread(target=self.provider.shutdown, name="otlp-end", daemon=True)
        ending.start()
        ending.join(_FLUSH_S)


_exporter: _Exporter | None = None


def start_span(
    name: str,
    traceparent: str,
    attributes: Attributes | None = None,
    *,
    may_begin: bool = False,
) -> RequestSpan:
    """Start a span of this process as a child of the span that `traceparent` names, and return it.

    The sampling flag of the parent decides whether the span is recorded. If `traceparent` is
    invalid, or is empty and `may_begin` is set, the span begins a new trace and the sampling ratio
    decides. If `traceparent` is empty and `may_begin` is not set, returns `NO_SPAN`.
    """
    if _exporter is None or not (traceparent or may_begin):
        return NO_SPAN
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = Context()
    if len(traceparent) <= MAX_HEADER_CHARS:
        header = {"traceparent": traceparent}
        parent = TraceContextTextMapPropagator().extract(header, context=parent)
    span = _exporter.tracer.start_span(
        name, parent, kind=SpanKind.SERVER, attributes=dict(attributes or {})
    )
    return RequestSpan(span) if span.is_recording() else NO_SPAN


def round_sampling() -> RoundTraceSampler:
    """Create the sampler that selects the rounds of a traced session that get a span."""
    return RoundTraceSampler(1 if _exporter is None else _exporter.rounds)


def to_wall_time(monotonic: float) -> float:
    """Convert a time of `time.monotonic` to wall-clock time, in seconds."""
    return time.time() - (time.monotonic() - monotonic)


@contextmanager
def export_spans(config: TracingConfig, service: str, instance: str = "") -> Generator[None]:
    """Export spans within the context if the configuration names a collector; otherwise do nothing.

    `service` and `instance` name this process in its spans. Raises FailedPreconditionError
    (NO_OPENTELEMETRY) if a collector is configured and OpenTelemetry is not installed.
    """
    global _exporter
    if not config.otlp_endpoint:
        yield
        return
    exporter = _exporter = _Exporter(config, service, instance)
    try:
        yield
    finally:
        _exporter = None
        exporter.close()
