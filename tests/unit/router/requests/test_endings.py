"""However a request ends, everything it held is freed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from outrider_router.requests.service import RouterService

from outrider.errors import (
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OutriderError,
)
from outrider.ids import RequestId
from outrider.wire.messages import SessionSpec
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request
from tests.waiting import soon, until


async def test_closing_the_stream_frees_everything(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    events = router.stream(text_request(max_tokens=1000))
    for _ in range(3):
        await anext(events)
    assert verifier.live
    await events.aclose()
    await assert_all_freed(router, verifier)
    assert sample(router, "outrider_requests_total", outcome="cancelled") == 1


async def test_cancelling_the_task_frees_everything(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    task = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
    await until(lambda: verifier.live)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_all_freed(router, verifier)


async def test_abort_by_id_ends_running_and_queued_requests_and_is_idempotent(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(max_sessions=1, round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}) as router:
        running, queued = RequestId("running"), RequestId("queued")
        tasks = [
            asyncio.create_task(router.generate(text_request(max_tokens=1000, request_id=id_)))
            for id_ in (running, queued)
        ]
        await until(lambda: router.admission.num_waiting == 1 and verifier.live)
        assert router.abort_requests([running, queued, RequestId("unknown")]) == (running, queued)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, CancelledRequestError)
            assert outcome.reason == "ABORTED"
        assert router.abort_requests([running, queued]) == ()
        await assert_all_freed(router, verifier)


async def test_a_deadline_ends_a_running_request(
    router: RouterService, verifier: FakeVerifier
) -> None:
    verifier.round_s = 0.01
    with pytest.raises(DeadlineExceededError):
        await router.generate(text_request(max_tokens=1000), timeout_s=0.1)
    await assert_all_freed(router, verifier)


async def test_a_deadline_ends_a_queued_request(tmp_path: Path) -> None:
    verifier = FakeVerifier(max_sessions=1, round_s=0.01)
    async with running_router(tmp_path, {"v": verifier}) as router:
        holder = asyncio.create_task(router.generate(text_request(max_tokens=1000)))
        await until(lambda: verifier.live)
        with pytest.raises(DeadlineExceededError):
            await router.generate(text_request(), timeout_s=0.1)
        assert router.admission.num_waiting == 0
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await assert_all_freed(router, verifier)


async def test_a_request_that_ends_while_its_prompt_is_tokenized_hears_of_it_at_once(
    router: RouterService, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object, **options: object) -> tuple[int, ...]:
        await asyncio.sleep(30.0)
        return (1,)

    monkeypatch.setattr("outrider_router.requests.intake.tokenize_prompt", slow)
    aborted = asyncio.create_task(router.generate(text_request(request_id=RequestId("long"))))
    cancelled = asyncio.create_task(router.generate(text_request()))
    await until(lambda: len(router.running_requests) == 2)
    with pytest.raises(DeadlineExceededError):
        await soon(router.generate(text_request(), timeout_s=0.05))
    router.abort_requests([RequestId("long")])
    with pytest.raises(CancelledRequestError):
        await soon(aborted)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await assert_all_freed(router, verifier)
    assert not verifier.specs


@pytest.mark.parametrize(
    ("raised", "expected"), [(InvalidRequestError, InvalidRequestError), (KeyError, InternalError)]
)
async def test_an_error_of_the_session_reaches_the_client_and_frees_everything(
    router: RouterService,
    verifier: FakeVerifier,
    raised: type[Exception],
    expected: type[OutriderError],
) -> None:
    def broken(spec: SessionSpec) -> list[int]:
        raise raised("script")

    verifier.script = broken
    with pytest.raises(expected):
        await router.generate(text_request())
    await assert_all_freed(router, verifier)


async def test_a_thousand_cancelled_requests_leak_nothing(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.001)
    async with running_router(tmp_path, {"v": verifier}) as router:
        await cancel_a_thousand(router)
        await assert_all_freed(router, verifier)


async def cancel_a_thousand(router: RouterService) -> None:
    async def one(index: int) -> None:
        async with aclosing(router.stream(text_request(max_tokens=500))) as events:
            for _ in range(1 + index % 3):
                await anext(events)

    for start in range(0, 1000, 50):
        await asyncio.gather(*(one(i) for i in range(start, start + 50)))
