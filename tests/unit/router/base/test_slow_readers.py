"""Whoever does not read costs itself alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from outrider_router.api.inference_grpc import INFERENCE_SERVICE
from outrider_router.base.slow_readers import with_write_timeout
from outrider_router.config import OverloadConfig, RouterConfig
from outrider_router.requests.service import RouterService

from outrider.errors import ResourceExhaustedError
from outrider.ids import RequestId
from outrider.transport.grpc.error_status import to_typed_error
from outrider.wire.inference_codec import stream_request_to_pb
from tests.fakes.router import grpc_router, running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import soon, until

NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""A client that lets the server send no more than it reads."""


async def test_a_reader_that_is_slow_but_reads_is_sent_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    loop = asyncio.get_running_loop()
    now = loop.time()
    # Time that passes in writes alone, whatever the machine does.
    monkeypatch.setattr(loop, "time", lambda: now)

    async def write(number: int) -> None:
        nonlocal now
        now += 0.06
        await asyncio.sleep(0)
        read.append(number)

    async with with_write_timeout(write, slow_reader_timeout_s=0.1) as timed:
        for number in range(8):
            await timed(number)
    assert read == list(range(8))


async def test_a_pause_between_events_is_not_the_readers() -> None:
    read: list[int] = []

    async def write(number: int) -> None:
        read.append(number)

    async with with_write_timeout(write, slow_reader_timeout_s=0.05) as timed:
        await timed(1)
        await asyncio.sleep(0.15)
        await timed(2)
    assert read == [1, 2]


async def never(_: int) -> None:
    await asyncio.Event().wait()


async def test_a_reader_that_takes_nothing_for_too_long_is_left_with_a_typed_error() -> None:
    with pytest.raises(ResourceExhaustedError, match="read nothing") as raised:
        async with with_write_timeout(never, slow_reader_timeout_s=0.05) as timed:
            await timed(1)
    assert raised.value.reason == "SLOW_READER"


async def test_a_timeout_of_the_events_themselves_stays_what_it_is() -> None:
    with pytest.raises(TimeoutError, match="of the events"):
        async with with_write_timeout(never, slow_reader_timeout_s=5.0):
            raise TimeoutError("of the events")


@asynccontextmanager
async def slow_router(path: Path, verifier: FakeVerifier) -> AsyncGenerator[RouterService]:
    overload = OverloadConfig(slow_reader_timeout_s=0.5)
    async with running_router(path, {"v": verifier}, overload=overload) as service:
        yield service


def opened(channel: grpc.aio.Channel, **request: object) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    method = channel.unary_stream(f"/{INFERENCE_SERVICE}/GenerateStream")
    data = stream_request_to_pb(text_request(**request)).SerializeToString()  # type: ignore[arg-type]
    return method(data, timeout=30)


async def test_streams_that_nobody_reads_end_and_hold_up_no_other(tmp_path: Path) -> None:
    verifier = FakeVerifier(kv_blocks=4096, max_context_len=65_536, tokens_per_round=64)
    verifier.round_s = 0.001
    async with (
        slow_router(tmp_path, verifier) as router,
        grpc_router(router) as address,
        grpc.aio.insecure_channel(address, options=NARROW) as channel,
        grpc.aio.insecure_channel(address) as others,
    ):
        slow = [opened(channel, max_tokens=6000) for _ in range(8)]
        await asyncio.gather(*(call.read() for call in slow))
        await soon(router.generate(text_request(max_tokens=500)))
        assert len([1 async for _ in opened(others, max_tokens=500)]) > 1
        await until(lambda: len(router.running_requests) == 0)
        await assert_all_freed(router, verifier)
        assert sample(router, "outrider_refusals_total", reason="SLOW_READER") == 8
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await slow[0].read() is not grpc.aio.EOF:
                pass
        assert to_typed_error(raised.value).reason == "SLOW_READER"


async def test_an_answer_that_nobody_reads_gives_its_place_to_others_once_it_is_whole(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(
        kv_blocks=4096, max_context_len=65_536, tokens_per_round=64, max_sessions=1
    )
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        grpc_router(router) as address,
        grpc.aio.insecure_channel(address, options=NARROW) as channel,
    ):
        call = opened(channel, max_tokens=6000)
        await call.read()
        result = await soon(router.generate(text_request(max_tokens=5)))
        assert len(result.token_ids) == 5
        assert len(router.running_requests) == 1, "the unread answer is kept"
        call.cancel()
        await until(lambda: len(router.running_requests) == 0)
        await assert_all_freed(router, verifier)


async def test_a_request_that_is_aborted_ends_at_the_verifier_although_its_client_does_not_read(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(kv_blocks=4096, max_context_len=65_536, tokens_per_round=64)
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        grpc_router(router) as address,
        grpc.aio.insecure_channel(address, options=NARROW) as channel,
    ):
        verifier.round_s = 0.005
        call = opened(channel, max_tokens=60_000, request_id=RequestId("unread"))
        await call.read()
        (entry,) = router.running_requests
        await until(lambda: len(entry.output.token_ids) > 6000)
        assert router.abort_requests([RequestId("unread")])
        await until(lambda: not verifier.live)
        assert len(entry.output.token_ids) < 60_000
        assert router.admission.num_running == 0
        call.cancel()
        await until(lambda: len(router.running_requests) == 0)
        await assert_all_freed(router, verifier)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, 1e9])
def test_a_patience_without_end_is_refused(seconds: float) -> None:
    with pytest.raises(
        ValueError, match="slow_reader_timeout_s must be positive and at most 86400"
    ):
        OverloadConfig(slow_reader_timeout_s=seconds)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    [
        "discovery_interval_s",
        "poll_interval_s",
        "peer_timeout_s",
        "failover_timeout_s",
        "resume_grace_s",
        "drain_timeout_s",
    ],
)
def test_times_are_finite(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        RouterConfig(model=Path("m"), verifiers=("v",), **{name: seconds})  # type: ignore[arg-type]
