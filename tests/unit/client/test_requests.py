"""What goes with a request beside its prompt: logprobs, structure, metadata, a trace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from outrider_router.requests.service import RouterService

from outrider.client import AsyncClient, Client, InvalidRequestError
from outrider.client.options import make_request
from outrider.spec.structured_output import StructuredKind
from tests.fakes.router import grpc_router, running_router
from tests.fakes.verifier import FakeVerifier


@pytest.fixture
async def router(tmp_path: Path) -> AsyncGenerator[RouterService]:
    async with running_router(tmp_path, {"v": FakeVerifier(tokens_per_round=3)}) as service:
        yield service


async def test_both_clients_hand_out_logprobs(router: RouterService) -> None:
    expected = [-(3 + i) / 8 for i in range(8)]
    async with grpc_router(router) as address, AsyncClient(address) as client:

        def use() -> None:
            with Client(address) as same:
                answer = same.generate("abc", max_tokens=8, top_logprobs=2)
                assert [entry.logprob for entry in answer.logprobs] == expected
                with same.stream("abc", max_tokens=8, top_logprobs=2) as stream:
                    told = [entry for delta in stream for entry in delta.logprobs]
                    assert stream.result().logprobs == tuple(told) == answer.logprobs

        await asyncio.to_thread(use)
        answer = await client.generate("abc", max_tokens=8, top_logprobs=2)
        assert [entry.logprob for entry in answer.logprobs] == expected
        assert all(len(entry.top) == 2 for entry in answer.logprobs)
        assert (await client.generate("abc", max_tokens=8)).logprobs == ()
        with pytest.raises(InvalidRequestError, match=r"top_logprobs must be in \[0, 20\]"):
            await client.generate("abc", top_logprobs=21)


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "c"}}}
    structure = make_request("a", {"json_schema": schema}).structured_output
    assert structure is not None and structure.kind is StructuredKind.JSON_SCHEMA
    assert list(json.loads(structure.text)["properties"]) == ["b", "a"]
    assert make_request("a", {"json_schema": structure.text}).structured_output == structure


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"json_object": True}, StructuredKind.JSON_OBJECT),
        ({"regex": "a+"}, StructuredKind.REGEX),
        ({"grammar": 'start: "a"'}, StructuredKind.GRAMMAR),
    ],
)
def test_other_forms_say_what_they_are(options: Any, kind: StructuredKind) -> None:
    structure = make_request("a", options).structured_output
    assert structure is not None and structure.kind is kind
    with pytest.raises(InvalidRequestError, match="at most one of"):
        make_request("a", {**options, "json_schema": "{}"})


class Recorder(grpc.GenericRpcHandler):
    """A router that notes the metadata of each call, and says no more."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        self.seen.append({key: str(value) for key, value in details.invocation_metadata})
        return None


@pytest.fixture
async def recorder() -> AsyncGenerator[tuple[Recorder, str]]:
    noted = Recorder()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((noted,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield noted, f"127.0.0.1:{port}"
    await server.stop(0)


async def call_all(address: str, **options: object) -> None:
    """Each kind of call that generates, of both clients; none is answered."""
    from outrider.client import OutriderError, RetryPolicy

    retry, own = RetryPolicy(max_attempts=1), (("x-team", "search"),)
    said = {"metadata": (("x-job", "42"),)}
    async with AsyncClient(address, retry=retry, metadata=own, **options) as client:  # type: ignore[arg-type]
        for call in (client.generate("a", **said), client.stream("a", **said).result()):  # type: ignore[arg-type]
            with pytest.raises(OutriderError):
                await call
    with Client(address, retry=retry, metadata=own, **options) as same:  # type: ignore[arg-type]
        for call in (same.generate, lambda *a, **o: same.stream(*a, **o).result()):
            with pytest.raises(OutriderError):
                await asyncio.to_thread(call, "a", **said)


async def test_metadata_tenant_and_key_go_with_every_call(
    recorder: tuple[Recorder, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, address = recorder
    await call_all(address, tenant="blue", api_key="s3cret")
    assert len(noted.seen) >= 4
    wanted = {
        "x-team": "search",
        "x-job": "42",
        "x-outrider-tenant": "blue",
        "authorization": "Bearer s3cret",
    }
    for seen in noted.seen:
        assert wanted.items() <= seen.items() and "traceparent" not in seen


async def test_a_request_within_a_span_carries_its_context(
    recorder: tuple[Recorder, str],
) -> None:
    noted, address = recorder
    tracer = TracerProvider().get_tracer("test")
    standard: dict[str, str] = {}
    with tracer.start_as_current_span("outer"):
        TraceContextTextMapPropagator().inject(standard)
        # A thread of `to_thread` has the context, too.
        await call_all(address)
    assert len(noted.seen) >= 4
    assert {seen.get("traceparent") for seen in noted.seen} == {standard["traceparent"]}


async def test_a_trace_that_is_named_is_kept(recorder: tuple[Recorder, str]) -> None:
    noted, address = recorder
    named = f"00-{'a' * 32}-{'b' * 16}-00"
    async with AsyncClient(address, metadata=(("traceparent", named),)) as client:
        with (
            TracerProvider().get_tracer("test").start_as_current_span("outer"),
            pytest.raises(Exception, match="UNIMPLEMENTED|not found|Method"),
        ):
            await client.generate("a")
    assert [seen["traceparent"] for seen in noted.seen] == [named]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tenant": ""}, "INVALID_TENANT"),
        ({"tenant": "bl\u00fc"}, "INVALID_TENANT"),
        ({"api_key": "a\nb"}, "INVALID_API_KEY"),
        ({"metadata": (("X-Upper", "a"),)}, "INVALID_METADATA"),
        ({"metadata": (("x-line", "a\nb"),)}, "INVALID_METADATA"),
    ],
)
def test_what_no_header_can_carry_is_refused_without_being_shown(
    options: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        Client("127.0.0.1:1", **options)  # type: ignore[arg-type]
    assert error.value.reason == reason and "a\nb" not in error.value.message
