"""A client hears how many tokens of its prompt were in the prefix cache when its request was first
admitted, whatever happens to the request afterwards."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from outrider.errors import InternalError
from outrider.wire.inference import FinishInfo
from outrider.wire.messages import SessionSpec
from tests.fakes.router import grpc_router, running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, collect, emitted, pair, text_request
from tests.unit.router.requests.test_resumable_answers import Reader, resumable
from tests.waiting import soon, until


def cached_of_epoch(spec: SessionSpec) -> int:
    """Two tokens of the first session of a request, three of every later one."""
    return 3 if spec.epoch else 2


def cached_in(finish: object) -> int:
    assert isinstance(finish, FinishInfo)
    return finish.usage.cached_tokens


async def test_the_sdk_has_the_number_in_results_and_streams(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.cached = cached_of_epoch
    async with (
        running_router(tmp_path, {"v": verifier}) as router,
        grpc_router(router) as address,
        AsyncClient(address) as client,
    ):
        result = await client.generate("abc", max_tokens=4)
        async with client.stream("abc", max_tokens=4) as stream:
            async for _delta in stream:
                pass
            assert stream.finish is not None and cached_in(stream.finish) == 2
    assert cached_in(result.finish) == 2


async def test_a_session_that_follows_a_lost_one_does_not_change_the_number(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        both.first.cached = both.second.cached = cached_of_epoch
        task = asyncio.create_task(collect(both.router, text_request(max_tokens=30)))
        await emitted(both.router, 10)
        both.first.lost.set()
        events = await soon(task)
        assert both.second.specs[0].epoch > 0
        assert cached_in(events[-1]) == 2


async def test_a_session_that_was_lost_before_its_first_token_does_not_count(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        both.first.cached = both.second.cached = cached_of_epoch
        both.first.gate = asyncio.Event()
        task = asyncio.create_task(collect(both.router, text_request()))
        await until(lambda: both.first.live)
        both.first.lost.set()
        assert cached_in((await soon(task))[-1]) == 3


@pytest.mark.parametrize("rewritten", [False, True])
async def test_a_restarted_router_has_the_number_from_its_journal(
    tmp_path: Path, rewritten: bool
) -> None:
    verifier, left = FakeVerifier(round_s=0.002), tmp_path / "left"
    verifier.cached = cached_of_epoch
    async with running_router(tmp_path, {"v": verifier}, journal=tmp_path / "log") as router:
        first = Reader().begin(router, resumable(60))
        await until(lambda: len(first.ids) >= 5)
        shutil.copy(tmp_path / "log", left)
    if rewritten:
        # Every start rewrites the journal.
        stalled = FakeVerifier()
        stalled.gate = asyncio.Event()
        async with running_router(tmp_path, {"v": stalled}, journal=left):
            await until(lambda: stalled.live)
    other = FakeVerifier()
    other.cached = cached_of_epoch
    async with running_router(tmp_path, {"v": other}, journal=left) as router:
        second = Reader().resume(router)
        assert second.task is not None
        await second.task
        assert other.specs[0].epoch > 0
        assert cached_in(second.finish) == 2
    async with running_router(tmp_path, {"v": other}, journal=left) as router:
        third = Reader().resume(router)
        assert third.task is not None
        await third.task
        assert cached_in(third.finish) == 2


async def test_a_verifier_that_claims_more_than_the_prompt_fails_its_session(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier()
    verifier.cached = lambda spec: spec.prompt_len + 1
    async with running_router(tmp_path, {"v": verifier}, max_failovers=1) as router:
        with pytest.raises(InternalError) as refused:
            await soon(router.generate(text_request()))
        assert refused.value.reason == "INVALID_EVENTS"
        assert len(verifier.specs) == 2
        verifier.cached = lambda spec: spec.prompt_len
        result = await soon(router.generate(text_request()))
        assert cached_in(result.finish) == result.finish.usage.prompt_tokens == 3
        await assert_all_freed(router, verifier)
