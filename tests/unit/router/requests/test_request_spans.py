"""What a router traces of its requests, and what it says of it in its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from outrider_router.requests.service import RouterService

from outrider.errors import InternalError, InvalidRequestError
from outrider.ids import RequestId
from outrider.spans import TracingConfig, export_spans
from outrider.wire.inference import StreamEvent
from outrider.wire.inference_codec import request_to_pb
from outrider.wire.v1 import inference_pb2_grpc
from tests.fakes.collector import Collector, collecting
from tests.fakes.router import grpc_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import collect, emitted, pair, text_request

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with (
        collecting() as running,
        export_spans(TracingConfig(otlp_endpoint=running.address), "router"),
    ):
        yield running


async def received(collector: Collector, count: int) -> None:
    """Wait until so many requests' spans have come."""
    await asyncio.to_thread(
        collector.wait, lambda: len(collector.spans("outrider.request")) >= count
    )


async def test_a_clients_trace_goes_on_in_the_router_and_on_its_verifier(
    collector: Collector, router: RouterService, verifier: FakeVerifier
) -> None:
    async with grpc_router(router) as address, grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await stub.Generate(request_to_pb(text_request()), metadata=metadata)
    await received(collector, 1)
    (request,) = collector.spans("outrider.request")
    (queue,), (session,) = collector.spans("outrider.queue"), collector.spans("outrider.session")
    assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
    assert queue.parent_id == session.parent_id == request.span_id
    assert verifier.specs[0].traceparent == f"00-{TRACE}-{session.span_id}-01"
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["outrider.rounds"] == 5
    assert "first_token" in request.events
    assert session.attributes["outrider.verifier"] == "v0"


async def test_a_request_that_is_not_sampled_is_traced_nowhere(
    collector: Collector, router: RouterService, verifier: FakeVerifier
) -> None:
    async for _ in router.stream(text_request(), traceparent=f"00-{TRACE}-{PARENT}-00"):
        pass
    await router.generate(text_request())
    await received(collector, 1)
    assert [span.trace_id == TRACE for span in collector.spans()] == [False] * 3
    assert [bool(spec.traceparent) for spec in verifier.specs] == [False, True]


async def test_a_failover_is_two_sessions_of_one_request(
    collector: Collector, tmp_path: Path
) -> None:
    async with pair(tmp_path) as both:
        task = asyncio.create_task(collect(both.router, text_request(max_tokens=30)))
        await emitted(both.router, 10)
        both.first.lost.set()
        await asyncio.wait_for(task, 30)
    await received(collector, 1)
    (request,) = collector.spans("outrider.request")
    lost, resumed = collector.spans("outrider.session")
    assert (lost.failed, resumed.failed, request.failed) == (True, False, False)
    assert lost.attributes["error.type"] == "UNAVAILABLE"
    assert lost.attributes["outrider.session_id"] == resumed.attributes["outrider.session_id"]
    assert (lost.attributes["outrider.epoch"], resumed.attributes["outrider.epoch"]) == (0, 1)
    assert resumed.attributes["outrider.resumed_tokens"] >= 10
    assert "session_lost" in request.events


async def test_a_refused_request_says_why(collector: Collector, router: RouterService) -> None:
    with pytest.raises(InvalidRequestError):
        await router.generate(text_request(""))
    await received(collector, 1)
    (request,) = collector.spans("outrider.request")
    assert request.failed and request.attributes["error.type"] == "INVALID_ARGUMENT"


async def test_the_end_of_a_request_is_logged_with_its_ids(
    collector: Collector,
    router: RouterService,
    verifier: FakeVerifier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "outrider_router"):
        await router.generate(text_request())
    (ended,) = [r for r in caplog.records if r.getMessage() == "request ended"]
    await received(collector, 1)
    (request,) = collector.spans("outrider.request")
    assert vars(ended)["trace_id"] == request.trace_id
    assert vars(ended)["request_id"] == request.attributes["gen_ai.response.id"]
    assert vars(ended)["session_id"] == verifier.specs[0].session_id


async def test_an_internal_error_is_logged_with_the_requests_id_and_why(
    router: RouterService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = InternalError("the model gave no finite logit", reason="MODEL_OUTPUT_INVALID")

    async def fail(*_: object) -> AsyncGenerator[StreamEvent, None]:
        raise error
        yield

    monkeypatch.setattr(router.serving, "run_request", fail)
    with caplog.at_level(logging.INFO, "outrider_router"), pytest.raises(InternalError):
        await router.generate(replace(text_request(), request_id=RequestId("mine")))
    (ended,) = [r for r in caplog.records if r.getMessage() == "request ended"]
    assert ended.levelno == logging.ERROR
    facts = vars(ended)
    assert facts["request_id"] == "mine" and facts["outcome"] == "INTERNAL"
    assert (facts["reason"], facts["problem"]) == (error.reason, error.message)


async def test_what_a_client_sent_is_not_in_the_log_of_its_refusal(
    router: RouterService, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "outrider_router"), pytest.raises(InvalidRequestError):
        await router.generate(text_request(""))
    (ended,) = [r for r in caplog.records if r.getMessage() == "request ended"]
    assert ended.levelno == logging.INFO
    assert "problem" not in vars(ended) and vars(ended)["reason"]


async def test_without_a_collector_a_request_has_no_trace_id(
    router: RouterService, verifier: FakeVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "outrider_router"):
        async for _ in router.stream(text_request(), traceparent=f"00-{TRACE}-{PARENT}-01"):
            pass
    (ended,) = [r for r in caplog.records if r.getMessage() == "request ended"]
    assert "trace_id" not in vars(ended)
    assert [spec.traceparent for spec in verifier.specs] == [""]


async def test_a_trace_counts_tokens_to_the_stop_string(
    collector: Collector, router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.tokens_per_round = 64
    request = text_request(max_tokens=200)
    await router.generate(replace(request, stopping=replace(request.stopping, stop=("bca",))))
    await received(collector, 1)
    (ended,) = collector.spans("outrider.request")
    assert ended.attributes["gen_ai.usage.output_tokens"] == 4
    assert ended.attributes["gen_ai.response.finish_reasons"] == ["stop_string"]
