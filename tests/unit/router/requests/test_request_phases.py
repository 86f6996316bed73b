"""Requests of a router on scripted verifiers that fail in one phase or another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from outrider_router.requests.running_requests import (
    RequestEntry,
    RequestLifecycle,
    RequestPhase,
    run_unless_failed,
)
from outrider_router.requests.service import RouterService

from outrider.errors import CancelledRequestError
from outrider.ids import RequestId
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, pair, text_request
from tests.waiting import soon, until

P = RequestPhase
NAME = RequestId("r")


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[RequestPhase]:
    """Phases that requests enter, in order."""
    entered: list[RequestPhase] = []
    enter = RequestLifecycle.enter

    def noted(self: RequestLifecycle, phase: RequestPhase, *more: Any) -> None:
        enter(self, phase, *more)
        entered.append(phase)

    monkeypatch.setattr(RequestLifecycle, "enter", noted)
    return entered


async def test_a_request_is_validated_queued_and_streamed(
    router: RouterService, verifier: FakeVerifier, phases: list[RequestPhase]
) -> None:
    await router.generate(text_request())
    assert phases == [P.VALIDATING, P.PENDING, P.QUEUED, P.PENDING, P.STREAMING, P.PENDING, P.ENDED]
    await assert_all_freed(router, verifier)


async def test_a_request_that_is_aborted_while_it_streams_fails_and_ends(
    router: RouterService, verifier: FakeVerifier, phases: list[RequestPhase]
) -> None:
    verifier.gate = asyncio.Event()
    task = asyncio.create_task(router.generate(text_request(request_id=NAME)))
    await until(lambda: verifier.live)
    assert router.abort_requests([NAME]) == (NAME,)
    assert router.abort_requests([NAME]) == (), "it was aborted before"
    with pytest.raises(CancelledRequestError):
        await soon(task)
    assert phases[-3:] == [P.STREAMING, P.FAILING, P.ENDED]
    await assert_all_freed(router, verifier)


async def test_a_session_on_a_draining_verifier_is_relocated(
    tmp_path: Path, phases: list[RequestPhase]
) -> None:
    async with pair(tmp_path) as both:
        task = asyncio.create_task(both.router.generate(text_request(max_tokens=100)))
        await until(lambda: both.first.live)
        await both.first.drain(30.0)
        assert (await soon(task)).text == ("abc" * 34)[:100]
        await both.freed()
    middle = phases[phases.index(P.STREAMING) : -2]
    assert middle == [P.STREAMING, P.RELOCATING, P.PENDING, P.STREAMING]


async def test_a_request_that_is_aborted_as_it_gets_capacity_opens_no_session(
    router: RouterService, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = router.admission.reserve_capacity

    async def reserve_and_abort(*arguments: Any) -> object:
        reservation = await reserve(*arguments)
        assert router.abort_requests([NAME]) == (NAME,)
        return reservation

    monkeypatch.setattr(router.admission, "reserve_capacity", reserve_and_abort)
    with pytest.raises(CancelledRequestError):
        await soon(router.generate(text_request(request_id=NAME)))
    assert verifier.specs == []
    await assert_all_freed(router, verifier)


async def test_a_request_that_fails_before_it_begins_is_not_validated() -> None:
    entry = RequestEntry(request_id=NAME, arrived_at=0.0)
    entry.fail_request(CancelledRequestError("it was aborted", reason="ABORTED"))

    async def made() -> None:
        raise AssertionError("it was validated")

    with pytest.raises(CancelledRequestError):
        await run_unless_failed(entry, made)
