"""A running stack as it is watched: one trace over three processes, and logs that name it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.wire.inference import GenerateRequest, StoppingOptions, TextPrompt
from outrider.wire.inference_codec import request_to_pb
from outrider.wire.v1 import inference_pb2_grpc
from tests.fakes.collector import Collector, collecting
from tests.integration.stack import Stack
from tests.unit.monitoring.expressions import metric_names, ready_for_prometheus, selectors
from tests.unit.monitoring.test_rules import RECORDED, TARGETS, rules

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET, PROMPT = "sk-never-in-a-log", "Marmalade and thunder: 0 1 2 3 4 5 6 7 8 9"
TOKENS = 40
TARGET_LABELS = {"cluster", "namespace", "fleet", "job", "instance"}
"""Labels that Prometheus gives the series of a target, as far as the target has them."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def watched(
    tiny_target: Path, tiny_head: Path, collector: Collector, directory: Path
) -> Iterator[Stack]:
    """A stack that exports spans, having served one request whose client traces it."""
    flags = ["--otlp-endpoint", collector.address, "--trace-ratio", "0", "--metrics-port", "0"]
    model = {"model": str(tiny_target), "head": str(tiny_head)}
    stack = Stack(directory, **model, router=flags, verifier=flags, drafter=flags)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ending:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        running = ending.enter_context(stack)
        request = GenerateRequest(
            prompt=TextPrompt(PROMPT),
            stopping=StoppingOptions(max_tokens=TOKENS, ignore_eos=True),
        )
        metadata = (
            ("traceparent", f"00-{TRACE}-{PARENT}-01"),
            ("authorization", f"Bearer {SECRET}"),
        )
        with grpc.insecure_channel(running.router.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for traced in ((), metadata):
                stub.Generate(request_to_pb(request), metadata=traced, timeout=60)
        yield running


def lines(directory: Path) -> list[dict[str, object]]:
    """Every line of every process's log; fails on one that is no JSON object."""
    found: list[dict[str, object]] = []
    for file in directory.glob("*.log"):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def scraped(stack: Stack) -> dict[str, set[str]]:
    """Names of the labels of every sample that the three processes export, by its name."""
    found: dict[str, set[str]] = {}
    for process in (stack.router, stack.verifier, stack.drafter):
        address = f"http://{process.ready['metrics']}/metrics"
        with urllib.request.urlopen(address, timeout=30) as response:
            page = response.read().decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_a_running_stack_exports_all_that_rules_alerts_and_board_ask_for(watched: Stack) -> None:
    samples = scraped(watched)
    expressions = [rule["expr"] for rule in rules()]
    expressions += [ready_for_prometheus(expression) for _, expression in TARGETS]
    missing = {name for text in expressions for name in metric_names(text)}
    assert missing - samples.keys() - RECORDED == {"up"}, "not exported"
    for text in expressions:
        for name, labels in selectors(text):
            known = samples.get(name, {"job"}) | TARGET_LABELS
            assert labels <= known, f"{name} has no such labels"


def test_one_trace_goes_through_router_verifier_and_drafter(
    watched: Stack, collector: Collector
) -> None:
    watched.drafter.terminate()
    watched.drafter.wait_ended()  # what it has is sent at its end at the latest
    collector.wait(lambda: collector.spans("outrider.request"))
    collector.wait(lambda: collector.spans("outrider.verifier.session"))
    collector.wait(lambda: collector.spans("outrider.drafter.session"))
    (request,) = collector.spans("outrider.request")
    (session,) = collector.spans("outrider.session")
    (verified,) = collector.spans("outrider.verifier.session")
    drafted = collector.spans("outrider.drafter.session")[0]
    found = (request, session, verified, drafted)
    assert {span.trace_id for span in found} == {TRACE}
    assert [span.service for span in found] == [
        "outrider-router",
        "outrider-router",
        "outrider-verifier",
        "outrider-drafter",
    ]
    assert request.parent_id == PARENT
    assert session.parent_id == request.span_id
    assert verified.parent_id == drafted.parent_id == session.span_id
    assert not any(span.failed for span in found)


def test_rounds_and_drafts_are_spans_that_add_up(watched: Stack, collector: Collector) -> None:
    collector.wait(lambda: collector.spans("outrider.verifier.session"))
    (verified,) = collector.spans("outrider.verifier.session")
    (prefill,) = collector.spans("outrider.prefill")
    rounds = collector.spans("outrider.round")
    assert {span.parent_id for span in (prefill, *rounds)} == {verified.span_id}
    emitted = sum(span.attributes["outrider.tokens"] for span in (prefill, *rounds))
    assert emitted == verified.attributes["outrider.tokens"] == TOKENS
    for name in ("draft_tokens", "accepted_tokens"):
        total = sum(span.attributes[f"outrider.{name}"] for span in rounds)
        assert total == verified.attributes[f"outrider.{name}"]
    assert verified.attributes["outrider.rounds"] == len(rounds)
    drafts = collector.spans("outrider.draft")
    assert drafts and all(span.attributes["outrider.draft_tokens"] >= 0 for span in drafts)


def test_what_nobody_traces_is_not_traced(watched: Stack, collector: Collector) -> None:
    assert {span.trace_id for span in collector.spans()} == {TRACE}


def test_logs_are_json_with_the_ids_that_spans_have(
    watched: Stack, collector: Collector, directory: Path
) -> None:
    collector.wait(lambda: collector.spans("outrider.session"))
    plain, traced = [line for line in lines(directory) if line["event"] == "request ended"]
    (session,) = collector.spans("outrider.session")
    assert traced["trace_id"] == TRACE and "trace_id" not in plain
    assert traced["session_id"] == session.attributes["outrider.session_id"]
    assert plain["request_id"] != traced["request_id"]


def test_logs_and_spans_hold_no_prompt_and_no_secret(
    watched: Stack, collector: Collector, directory: Path
) -> None:
    said = json.dumps(lines(directory)) + repr(collector.spans())
    assert len(said) > 1000
    assert not re.search("|".join((SECRET, "Bearer", "Marmalade")), said)
