"""Streams that a client resumes at a router which does not have the request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from outrider_router.api.stream_forwarding import FORWARDED_KEY, StreamForwarder
from outrider_router.base.tenants import TenantSource
from outrider_router.config import OverloadConfig
from outrider_router.requests.service import RouterService

from outrider.client import AsyncClient, RetryPolicy
from outrider.errors import (
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.ids import RequestId
from outrider.transport.grpc import GrpcDialer
from outrider.transport.grpc.error_status import to_lost_error
from outrider.wire.inference import Delta, FinishInfo, StreamEvent, StreamPosition
from outrider.wire.inference_codec import position_to_pb, stream_request_to_pb
from outrider.wire.inference_response_codec import resumed_event_from_pb
from outrider.wire.v1 import inference_pb2_grpc as pb_grpc
from tests.fakes.proxy import proxied
from tests.fakes.router import grpc_router, running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import emitted, text_request
from tests.waiting import soon, until

NAME = RequestId("r")
Pairs = tuple[tuple[str, str], ...]


@dataclass
class Fleet:
    """Two routers that know each other's addresses and their own."""

    first: RouterService
    second: RouterService
    verifier: FakeVerifier
    """That of the first router."""
    addresses: list[str] = field(default_factory=list)
    """Addresses that both routers call."""
    first_address: str = ""
    second_address: str = ""
    dialer: GrpcDialer = field(default_factory=GrpcDialer)
    """That of the second router."""

    async def start_stream(self, *metadata: tuple[str, str], tokens: int = 40) -> list[int]:
        """Open a stream at the first router, and lose its connection after some tokens. Return the
        ids that have arrived.
        """
        request = text_request(max_tokens=tokens, request_id=NAME, resumable=True)
        ids: list[int] = []
        async with grpc.aio.insecure_channel(self.first_address) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            call = stub.GenerateStream(stream_request_to_pb(request), metadata=metadata)
            async for message in call:
                ids += message.delta.token_ids
                if len(ids) >= 5:
                    call.cancel()
                    break
        return ids

    async def resume(
        self, position: StreamPosition, *metadata: tuple[str, str]
    ) -> list[StreamEvent]:
        """Resume a stream at the second router, and read it to its end."""
        return await soon(read(self.second_address, position, metadata))

    def outcomes(self) -> dict[str, float]:
        """Searches of the second router by outcome, without those that were none."""
        names = ("found", "not_found", "unreachable")
        counts = {
            name: sample(self.second, "outrider_forwarded_streams_total", outcome=name)
            for name in names
        }
        return {name: count for name, count in counts.items() if count}


async def read(address: str, position: StreamPosition, metadata: Pairs = ()) -> list[StreamEvent]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        call = stub.ResumeStream(position_to_pb(position), metadata=metadata)
        try:
            return [resumed_event_from_pb(message) async for message in call]
        except grpc.aio.AioRpcError as error:
            raise to_lost_error(error, peer=address) from None


@asynccontextmanager
async def fleet(directory: Path, **config: Any) -> AsyncGenerator[Fleet]:
    async with AsyncExitStack() as stack:
        routers = []
        verifiers = [FakeVerifier(round_s=0.01), FakeVerifier()]
        for number, verifier in enumerate(verifiers):
            own = directory / str(number)
            own.mkdir()
            router = running_router(own, {"v": verifier}, **config)
            routers.append(await stack.enter_async_context(router))
        made = Fleet(routers[0], routers[1], verifiers[0])
        for router, dialer in ((made.first, GrpcDialer()), (made.second, made.dialer)):
            forwarder = StreamForwarder(
                lambda: made.addresses, dialer, router.metrics, lookup_timeout_s=0.5
            )
            served = grpc_router(router, forwarder=forwarder)
            made.addresses.append(await stack.enter_async_context(served))
        made.first_address, made.second_address = made.addresses
        yield made


def at(name: str, tokens: int, characters: int) -> StreamPosition:
    return StreamPosition(request_id=RequestId(name), tokens=tokens, characters=characters)


def ids_of(events: list[StreamEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


async def test_a_stream_goes_on_through_a_router_that_does_not_have_it(tmp_path: Path) -> None:
    async with fleet(tmp_path) as both:
        heard = await both.start_stream()
        events = await both.resume(at(NAME, len(heard), len(heard)))
        assert isinstance(events[-1], FinishInfo)
        expected = both.first.tokenizer.encode("abc" * 20)[:40]
        assert [*heard, *ids_of(events)] == list(expected)
        # The end is kept, too, and may be read again from the beginning.
        again = await both.resume(at(NAME, 0, 0))
        assert ids_of(again) == list(expected)
        assert both.outcomes() == {"found": 2}
        assert sample(both.first, "outrider_resumed_streams_total") == 2


async def test_an_unknown_request_is_refused_and_calls_go_one_hop(tmp_path: Path) -> None:
    async with fleet(tmp_path) as both:
        with pytest.raises(NotFoundError) as caught:
            await both.resume(at(NAME, 3, 3))
        assert caught.value.reason == "NO_STREAM" and caught.value.retry_after_s is None
        assert both.outcomes() == {"not_found": 1}
        assert sample(both.first, "outrider_forwarded_streams_total", outcome="not_found") == 0
        # A client that claims to be a router only loses the search for its request.
        with pytest.raises(NotFoundError):
            await both.resume(at(NAME, 3, 3), (FORWARDED_KEY, "1"))
        assert both.outcomes() == {"not_found": 1}


async def test_a_tenant_does_not_resume_the_request_of_another(tmp_path: Path) -> None:
    overload = OverloadConfig(tenant_from=TenantSource.METADATA)
    async with fleet(tmp_path, overload=overload) as both:
        mine, theirs = ("x-outrider-tenant", "blue"), ("x-outrider-tenant", "red")
        heard = await both.start_stream(mine)
        position = at(NAME, len(heard), len(heard))
        for other in ((theirs,), ()):
            with pytest.raises(NotFoundError):
                await both.resume(position, *other)
        assert sample(both.first, "outrider_resumed_streams_total") == 0
        events = await both.resume(position, mine)
        assert len(heard) + len(ids_of(events)) == 40


async def test_errors_of_the_router_that_has_the_request_are_those_of_the_call(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as both:
        await both.start_stream()
        with pytest.raises(InvalidRequestError) as caught:
            await both.resume(at(NAME, 4000, 4000))
        assert caught.value.reason == "INVALID_POSITION"
        both.first.abort_requests([NAME])
        await until(lambda: len(both.first.running_requests) == 0)


async def test_a_router_that_does_not_answer_may_have_the_request(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with fleet(tmp_path) as both:
            host, port = silent.getsockname()
            both.addresses.append(f"{host}:{port}")
            with pytest.raises(UnavailableError) as caught:
                await both.resume(at(NAME, 3, 3))
            assert caught.value.reason == "ROUTER_UNREACHABLE"
            # A router that is down does not hide the one that has the request.
            both.addresses[-1] = "127.0.0.1:1"
            heard = await both.start_stream()
            events = await both.resume(at(NAME, len(heard), len(heard)))
            assert len(heard) + len(ids_of(events)) == 40
            both.addresses.clear()
            with pytest.raises(UnavailableError, match="no other router is known"):
                await both.resume(at("other", 3, 3))
            assert both.outcomes() == {"unreachable": 2, "found": 1}


@pytest.mark.parametrize("chosen", [None, "mine"])
async def test_a_request_that_may_run_on_an_unreachable_router_is_sent_again_with_a_new_id(
    tmp_path: Path, chosen: str | None
) -> None:
    async with fleet(tmp_path) as both, proxied(both.first_address) as proxy:
        both.addresses[:] = ["127.0.0.1:1"]
        both.verifier.refusals = 1 << 20
        options: dict[str, Any] = {} if chosen is None else {"request_id": chosen}
        async with AsyncClient(proxy.address, retry=RetryPolicy(first_delay_s=0.05)) as client:
            stream = client.stream("abc", max_tokens=40, **options)
            answer = asyncio.create_task(stream.result())
            await until(lambda: len(both.first.running_requests) == 1)
            (entry,) = both.first.running_requests
            proxy.redirect(both.second_address)
            proxy.cut()
            assert (await soon(answer)).text == ("abc" * 20)[:40]
        assert both.outcomes() == {"unreachable": 1}
        assert stream.info is not None
        assert (stream.info.request_id == entry.request_id) == (chosen is not None)


async def test_a_router_that_drains_still_gives_what_it_has_to_other_routers(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as both:
        heard = await both.start_stream()
        draining = asyncio.create_task(both.first.drain(20.0))
        await asyncio.sleep(0)
        position = at(NAME, len(heard), len(heard))
        with pytest.raises(UnavailableError) as caught:
            await read(both.first_address, position)
        assert caught.value.reason == "SHUTDOWN"
        events = await both.resume(position)
        assert len(heard) + len(ids_of(events)) == 40
        assert await soon(draining)
        # What it does not have is not there: it must not keep clients waiting.
        with pytest.raises(NotFoundError):
            await both.resume(at("other", 0, 0))


async def test_a_client_that_leaves_the_second_router_leaves_the_first(tmp_path: Path) -> None:
    async with fleet(tmp_path, resume_grace_s=0.3) as both:
        both.verifier.round_s = 0.05
        heard = await both.start_stream(tokens=400)
        position = at(NAME, len(heard), len(heard))
        call = asyncio.create_task(read(both.second_address, position))
        await until(lambda: both.outcomes() == {"found": 1})
        await emitted(both.first, len(heard) + 12)
        assert len(both.first.running_requests) == 1, "the client listens through the second"
        call.cancel()
        await until(lambda: len(both.first.running_requests) == 0)
        await until(lambda: not both.verifier.live)


async def test_many_searches_at_once_wait_for_each_other_and_all_end(tmp_path: Path) -> None:
    async with fleet(tmp_path) as both:

        async def one(number: int) -> str:
            try:
                await both.resume(at(f"x{number}", 1, 1))
            except OutriderError as error:
                return error.reason
            return "OK"

        reasons = await soon(asyncio.gather(*(one(number) for number in range(100))))
        assert set(reasons) <= {"NO_STREAM", "ROUTER_UNREACHABLE"} and len(reasons) == 100


@pytest.mark.parametrize("has_stream", [False, True])
async def test_lookups_that_end_while_others_begin_break_neither_those_nor_a_stream(
    tmp_path: Path, has_stream: bool
) -> None:
    async with fleet(tmp_path) as both, grpc.aio.insecure_channel(both.second_address) as channel:
        # Closing the channels of an ended lookup takes several turns of the event loop.
        both.addresses += [f"127.0.0.1:{port}" for port in range(1, 9)]
        resume = pb_grpc.InferenceServiceStub(channel).ResumeStream

        async def look_up(worker: int) -> set[str]:
            reasons = set()
            for number in range(30):
                call = resume(position_to_pb(at(f"x{worker}-{number}", 1, 1)))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                reasons.add(to_lost_error(caught.value, peer="second").reason)
            return reasons

        both.verifier.round_s = 0.02
        heard = await both.start_stream(tokens=80)
        position = at(NAME, len(heard), len(heard))
        stream = None
        if has_stream:
            stream = asyncio.create_task(read(both.second_address, position))
        reasons = await soon(asyncio.gather(*(look_up(worker) for worker in range(3))))
        assert set().union(*reasons) == {"ROUTER_UNREACHABLE"}
        events = await soon(stream or read(both.second_address, position))
        assert len(heard) + len(ids_of(events)) == 80
        await until(lambda: both.dialer.num_retired_channels == 0)
