"""A verifier that is about to stop: its sessions go elsewhere, or end where they are."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from outrider_router.api.server_status import make_server_info

from outrider.errors import UnavailableError
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, emitted, pair, text_request
from tests.waiting import soon, until

RESUMED = "outrider_resumed_sessions_total"


async def test_its_sessions_go_where_there_is_room_and_nothing_new_comes(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        tasks = [
            asyncio.create_task(both.router.generate(text_request(max_tokens=60))) for _ in range(6)
        ]
        await until(lambda: len(both.first.live) == len(both.second.live) == 3)
        await both.first.drain(10.0)
        await until(lambda: not both.first.live)
        await both.router.generate(text_request())
        results = await soon(asyncio.gather(*tasks))
        assert {result.text for result in results} == {"abc" * 20}
        assert (len(both.first.specs), len(both.second.specs)) == (3, 7)
        assert sample(both.router, RESUMED, cause="draining") == 3
        # It may stop now: that is no loss.
        both.first.lost.set()
        await until(lambda: sample(both.router, "outrider_verifier_up", verifier="v0") == 0)
        assert sample(both.router, "outrider_verifier_losses_total", verifier="v0") == 0
        await both.freed()


async def test_a_session_goes_on_where_it_is_until_there_is_a_place_for_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.second.change_info(max_sessions=1)
        await asyncio.sleep(0.1)
        stays = asyncio.create_task(both.router.generate(text_request(max_tokens=400)))
        await until(lambda: both.first.live)
        fills = asyncio.create_task(both.router.generate(text_request(max_tokens=60)))
        await until(lambda: both.second.live)
        (entry, _) = both.router.running_requests
        await both.first.drain(10.0)
        before = len(entry.output.token_ids)
        await until(lambda: len(entry.output.token_ids) > before + 5)
        assert both.first.live and not fills.done()
        await fills
        await until(lambda: both.second.live and not both.first.live)
        assert (await soon(stays)).text == ("abc" * 134)[:400]
        await both.freed()


async def test_without_another_one_sessions_end_where_they_are(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.005)
    async with running_router(tmp_path, {"v": verifier}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=40)))
        await emitted(router, 5)
        await verifier.drain(10.0)
        await until(lambda: router.registry.any_verifier_info() is None)
        with pytest.raises(UnavailableError) as refused:
            await router.generate(text_request())
        assert refused.value.reason == "NO_VERIFIER" and refused.value.retry_after_s
        assert (await soon(task)).text == ("abc" * 14)[:40]
        assert len(verifier.specs) == 1
        (summary,) = make_server_info(router).verifiers
        assert summary.draining
        await assert_all_freed(router, verifier)


async def test_what_it_could_not_finish_goes_on_when_it_is_back(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.005)
    async with running_router(tmp_path, {"v": verifier}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=60)))
        await emitted(router, 5)
        await verifier.drain(0.1)
        await asyncio.sleep(0.1)
        verifier.lost.set()
        await asyncio.sleep(0.1)
        assert not task.done()
        verifier.restart()
        assert (await soon(task)).text == "abc" * 20
        assert [spec.epoch for spec in verifier.specs] == [0, 1]
        await assert_all_freed(router, verifier)


async def test_a_session_that_comes_just_then_is_refused_and_goes_elsewhere(tmp_path: Path) -> None:
    async with pair(tmp_path, poll_interval_s=0.29) as both:
        # The message that says so is on its way; the next look is far.
        both.first.change_info(draining=True)
        results = [await both.router.generate(text_request()) for _ in range(3)]
        assert {result.text for result in results} == {"abcabc"}
        assert not both.first.specs and len(both.second.specs) == 3
        assert sample(both.router, RESUMED, cause="draining") <= 1


async def test_rolling_restarts_lose_no_request(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        texts: list[str] = []

        async def client(turns: int) -> None:
            for _ in range(turns):
                texts.append((await both.router.generate(text_request(max_tokens=30))).text)

        clients = [asyncio.create_task(client(12)) for _ in range(8)]
        for verifier in (both.first, both.second, both.first, both.second):
            await asyncio.sleep(0.1)
            await verifier.drain(5.0)
            await until(lambda here=verifier: not here.live)  # type: ignore[misc]
            verifier.lost.set()
            await asyncio.sleep(0.05)
            verifier.restart()
            await both.up(verifier)
        await asyncio.wait_for(asyncio.gather(*clients), 90)
        assert texts == ["abc" * 10] * 96
        assert sample(both.router, RESUMED, cause="draining") > 0
        await both.freed()


async def test_a_verifier_that_joins_takes_requests_and_one_that_leaves_takes_none_away(
    tmp_path: Path,
) -> None:
    first, second = FakeVerifier(round_s=0.002), FakeVerifier(round_s=0.002)
    second.change_info(verifier_id="v1")
    async with running_router(tmp_path, {"a": first, "b": second}) as router:
        registry = router.registry
        await registry.forget_verifier(registry.verifiers["b"])
        tasks = [
            asyncio.create_task(router.generate(text_request(max_tokens=60))) for _ in range(6)
        ]
        await until(lambda: len(first.live) == 6)
        registry.add_verifier("b")
        registry.add_verifier("b")
        await until(lambda: sample(router, "outrider_verifier_up", verifier="v1") == 1)
        await first.drain(10.0)
        await until(lambda: not first.live)
        await registry.forget_verifier(registry.verifiers["a"])
        results = await soon(asyncio.gather(*tasks))
        assert {result.text for result in results} == {"abc" * 20}
        (left,) = make_server_info(router).verifiers
        assert left.address == "b"
        assert sample(router, "outrider_verifier_up", verifier="v0") == 0
        assert (await router.generate(text_request())).text
        await assert_all_freed(router, second)
