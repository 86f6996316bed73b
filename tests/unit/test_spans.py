"""Spans of requests: none without a collector or a sample, and what OTLP carries of the others."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import spans
from outrider.errors import FailedPreconditionError, NotFoundError
from outrider.spans import NO_SPAN, RoundTraceSampler, TracingConfig, export_spans
from tests.fakes.collector import Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def config(collector: Collector, **more: Any) -> TracingConfig:
    return TracingConfig(otlp_endpoint=collector.address, **more)


def test_without_a_collector_nothing_is_traced() -> None:
    with export_spans(TracingConfig(), "x"):
        span = spans.start_span("a", SAMPLED, may_begin=True)
    assert span is NO_SPAN
    assert (span.is_sampled, span.traceparent, span.trace_id) == (False, "", "")
    with span.child("b") as child:
        child.event("c")
        child.set_attributes({"d": 1})
    assert child is NO_SPAN


def test_a_process_that_may_not_begin_a_trace_begins_none(collector: Collector) -> None:
    with export_spans(config(collector), "x"):
        assert spans.start_span("a", "") is NO_SPAN
        assert spans.start_span("a", UNSAMPLED) is NO_SPAN
        assert spans.start_span("a", SAMPLED).is_sampled


@pytest.mark.parametrize("header", ["", "junk", "00-" + "0" * 32 + f"-{PARENT}-01", "0" * 5000])
def test_without_a_sound_header_the_ratio_decides(collector: Collector, header: str) -> None:
    with export_spans(config(collector, sample_ratio=0.0), "x"):
        assert spans.start_span("a", header, may_begin=True) is NO_SPAN
    with export_spans(config(collector, sample_ratio=1.0), "x"):
        span = spans.start_span("a", header, may_begin=True)
        assert span.is_sampled and span.trace_id != TRACE


def test_a_client_that_wants_no_trace_gets_none(collector: Collector) -> None:
    with export_spans(config(collector), "x"):
        assert spans.start_span("a", UNSAMPLED, may_begin=True) is NO_SPAN


def test_what_was_said_of_a_span_reaches_the_collector(collector: Collector) -> None:
    with export_spans(config(collector), "outrider-x", "one"):
        span = spans.start_span("outer", SAMPLED, {"a": 1})
        began = time.time() - 5.0
        inner = span.child("inner", {"reasons": ("length",)}, began=began)
        inner.event("token")
        inner.end(at=began + 1.0)
        span.end(NotFoundError("no such thing", reason="X"))
        span.end()
    (outer,), (found,) = collector.spans("outer"), collector.spans("inner")
    assert (outer.service, outer.trace_id, outer.parent_id) == ("outrider-x", TRACE, PARENT)
    assert outer.failed and outer.attributes == {"a": 1, "error.type": "NOT_FOUND"}
    assert (found.trace_id, found.parent_id) == (TRACE, outer.span_id)
    assert found.attributes == {"reasons": ["length"]} and found.events == ("token",)
    assert found.ended - found.began == pytest.approx(1e9, abs=1e4)
    assert not found.failed


def test_another_process_goes_on_with_a_span(collector: Collector) -> None:
    with export_spans(config(collector), "first"):
        span = spans.start_span("ours", "", may_begin=True)
        header = span.traceparent
        span.end()
    with export_spans(config(collector, sample_ratio=0.0), "second"):
        spans.start_span("theirs", header).end()
    (ours,), (theirs,) = collector.spans("ours"), collector.spans("theirs")
    assert (theirs.trace_id, theirs.parent_id) == (ours.trace_id, ours.span_id)


def test_a_client_that_leaves_is_no_error(collector: Collector) -> None:
    with export_spans(config(collector), "x"):
        with pytest.raises(GeneratorExit), spans.start_span("a", SAMPLED):
            raise GeneratorExit
        with pytest.raises(ValueError), spans.start_span("b", SAMPLED):
            raise ValueError("boom")
    assert [span.failed for span in (*collector.spans("a"), *collector.spans("b"))] == [False, True]


def test_a_process_ends_though_its_collector_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")
    before = {*threading.enumerate()}
    began = time.monotonic()
    with export_spans(TracingConfig(otlp_endpoint="127.0.0.1:1"), "x"):
        spans.start_span("a", SAMPLED).end()
    assert time.monotonic() - began < 30.0
    # What is left tries again after random times, while another test may count on its own seed.
    for thread in {*threading.enumerate()} - before:
        thread.join(30.0)
        assert not thread.is_alive(), thread.name


def test_an_endpoint_without_opentelemetry_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with export_spans(TracingConfig(), "x"):
        pass
    refused = pytest.raises(FailedPreconditionError, match=r"pip install 'outrider\[trace\]'")
    with refused, export_spans(TracingConfig(otlp_endpoint="127.0.0.1:1"), "x"):
        pass


@pytest.mark.parametrize("wrong", [{"sample_ratio": 1.5}, {"sample_ratio": -0.1}, {"rounds": 0}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tracing\."):
        TracingConfig(**wrong)


def test_long_sessions_get_ever_fewer_spans() -> None:
    sampling = RoundTraceSampler(4)
    taken = [number for number in range(40) if sampling.should_sample()]
    assert taken == [0, 1, 2, 3, 5, 7, 9, 11, 15, 19, 23, 27, 35]
