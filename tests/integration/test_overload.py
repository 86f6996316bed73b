"""Real processes: cancels reach the verifier within a round; endings of all kinds hold nothing."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from outrider.client import AsyncClient, OutriderError, RetryPolicy
from outrider.client.options import make_request
from outrider.client.rpcs import GENERATE_STREAM
from outrider.transport.grpc import GrpcDialer
from outrider.transport.interface import VerifierControl
from outrider.wire.messages import VerifierInfo
from tests.integration.stack import Stack, StackOptions, slow_rounds
from tests.waiting import PATIENCE_S

ROUND_S = 0.1
"""What a round lasts here."""
PROMPT = "0 1 2 3 4 5 6 7 8 9 " * 20
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@pytest.fixture(scope="module")
def stack_options() -> StackOptions:
    """A fleet without a drafter, on which four sessions run at a time."""
    return {
        "router": ["--slow-reader-timeout-s", "0.5"],
        "verifier": ["--max-sessions", "4", *slow_rounds(1e3 * ROUND_S)],
        "with_drafter": False,
    }


async def until(control: VerifierControl, sessions: int) -> VerifierInfo:
    """What the verifier says as soon as it has so many sessions; none: and their blocks again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            info = await control.info()
            freed = info.kv_free_blocks == info.kv_total_blocks
            if info.sessions == sessions and (freed or sessions):
                return info
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("way", ["close", "abort", "deadline"])
async def test_a_request_that_ends_has_freed_its_blocks_within_a_round(
    stack: Stack, way: str
) -> None:
    dialer = GrpcDialer()
    control = await dialer.verifier(stack.verifier.address)
    lasted = []
    async with AsyncClient(stack.router.address, retry=RetryPolicy(max_attempts=1)) as client:
        for number in range(5):
            limit_s = 2.0 + 0.03 * number if way == "deadline" else 60.0
            deadline = time.monotonic() + limit_s
            stream = client.stream(
                PROMPT, max_tokens=1500, ignore_eos=True, request_id=way, timeout_s=limit_s
            )
            reading = asyncio.create_task(stream.result())
            await until(control, 1)
            if way == "deadline":
                await asyncio.sleep(deadline - time.monotonic())
            else:
                await asyncio.sleep(0.37 * ROUND_S * number)
            began = time.monotonic()
            if way == "abort":
                await client.abort([way])
            elif way == "close":
                await stream.close()
            await until(control, 0)
            lasted.append(time.monotonic() - began)
            with pytest.raises(OutriderError):
                await reading
    await dialer.close()
    # The round that runs ends first; messages and a loaded machine take the rest.
    assert sorted(lasted)[2] <= 3.0 * ROUND_S, lasted


async def test_requests_that_are_cancelled_late_or_never_read_leave_nothing(stack: Stack) -> None:
    dialer = GrpcDialer()
    control = await dialer.verifier(stack.verifier.address)
    codes: list[str] = []
    async with (
        AsyncClient(stack.router.address, retry=RetryPolicy(max_attempts=1)) as client,
        grpc.aio.insecure_channel(stack.router.address, options=NARROW) as narrow,
    ):

        async def cancelled(number: int) -> None:
            stream = client.stream(PROMPT, max_tokens=64, ignore_eos=True)
            reading = asyncio.create_task(stream.result())
            await asyncio.sleep(0.01 * number)
            await stream.close()
            await asyncio.gather(reading, return_exceptions=True)

        async def late(number: int) -> None:
            try:
                await client.generate(
                    PROMPT, max_tokens=1500, ignore_eos=True, timeout_s=0.01 * number
                )
            except OutriderError as error:
                codes.append(error.code)

        async def unread() -> grpc.aio.UnaryStreamCall[bytes, bytes]:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            method = narrow.unary_stream(GENERATE_STREAM.path)
            request = make_request("a", {"max_tokens": 8})
            return method(GENERATE_STREAM.encode(request), timeout=60.0)

        calls = [await unread() for _ in range(4)]
        await asyncio.gather(*map(cancelled, range(40)), *map(late, range(1, 21)))
        assert set(codes) == {"DEADLINE_EXCEEDED"}
        info = await until(control, 0)
        assert info.waiting_sessions == 0
        async with asyncio.timeout(PATIENCE_S):
            while (served := await client.server_info()).running or served.queued:
                await asyncio.sleep(0.02)
        for call in calls:
            call.cancel()
    await dialer.close()
