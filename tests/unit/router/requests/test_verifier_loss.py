"""Requests whose verifier is lost resume on another verifier, with the same text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import (
    CancelledRequestError,
    ConnectionLostError,
    DeadlineExceededError,
    InternalError,
    UnavailableError,
)
from outrider.ids import RequestId
from outrider.wire.inference import (
    Delta,
    FinishInfo,
    PromptInfo,
    SamplingOptions,
    StoppingOptions,
)
from outrider.wire.messages import FinishReason, SessionSpec
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, collect, emitted, pair, text_request
from tests.waiting import soon, until


def break_stream(verifier: FakeVerifier) -> None:
    verifier.lost.set()


def hang(verifier: FakeVerifier) -> None:
    verifier.hung = True


@pytest.mark.parametrize("kill", [break_stream, hang])
async def test_its_sessions_go_on_elsewhere_with_all_that_they_emitted(
    tmp_path: Path, kill: Callable[[FakeVerifier], None]
) -> None:
    async with pair(tmp_path) as both:
        request = text_request(max_tokens=30, sampling=SamplingOptions(seed=11))
        task = asyncio.create_task(collect(both.router, request))
        await emitted(both.router, 10)
        kill(both.first)
        events = await soon(task)
        assert [type(event) for event in events].count(PromptInfo) == 1
        assert "".join(e.text for e in events if isinstance(e, Delta)) == "abc" * 10
        assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 30
        finish = events[-1]
        assert isinstance(finish, FinishInfo) and finish.reason is FinishReason.LENGTH
        (old,), (new,) = both.first.specs, both.second.specs
        done = len(new.token_ids) - 3
        assert done >= 10 and new.max_new_tokens == 30 - done
        assert (old.session_id, old.epoch + 1) == (new.session_id, new.epoch)
        assert (new.prompt_len, new.sampling) == (3, old.sampling)
        assert sample(both.router, "outrider_failovers_total") == 1
        resumed = "outrider_resumed_sessions_total"
        assert sample(both.router, resumed, cause="verifier_lost") == 1
        both.first.restart()
        await both.freed()


@pytest.mark.parametrize("after", [2, 5, 6, 8])
async def test_stop_strings_are_found_across_the_gap(tmp_path: Path, after: int) -> None:
    async with pair(tmp_path) as both:
        text = "x<ab></ab>y"
        both.first.round_s = 0.02

        def halting(spec: SessionSpec) -> list[int]:
            ids = [*both.router.tokenizer.encode(text)]
            return ids[len(spec.token_ids) - spec.prompt_len :]

        both.first.script = both.second.script = halting
        stopping = StoppingOptions(max_tokens=11, stop=("</ab>",))
        request = replace(text_request(), stopping=stopping)
        task = asyncio.create_task(collect(both.router, request))
        await emitted(both.router, after)
        both.first.lost.set()
        events = await soon(task)
        assert "".join(e.text for e in events if isinstance(e, Delta)) == "x<ab>"
        finish = events[-1]
        assert isinstance(finish, FinishInfo) and finish.stop_string == "</ab>"
        assert len(both.second.specs) == 1


async def test_those_that_lost_their_verifier_go_first_and_no_full_queue_refuses_them(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, queue_limit=0) as both:
        for verifier in (both.first, both.second):
            verifier.change_info(max_sessions=4)
        await asyncio.sleep(0.1)
        tasks = [
            asyncio.create_task(both.router.generate(text_request(max_tokens=40))) for _ in range(8)
        ]
        await until(lambda: len(both.first.live) == len(both.second.live) == 4)
        both.first.lost.set()
        results = await soon(asyncio.gather(*tasks))
        assert {result.text for result in results} == {("abc" * 14)[:40]}
        both.first.restart()
        await both.freed()


async def test_without_another_one_they_wait_for_it_to_come_back(tmp_path: Path) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with running_router(tmp_path, {"v": verifier}) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=30)))
        await emitted(router, 5)
        verifier.lost.set()
        await until(
            lambda: (
                router.registry.any_verifier_info() is None and router.admission.num_waiting == 1
            )
        )
        verifier.restart()
        assert (await soon(task)).text == "abc" * 10
        await assert_all_freed(router, verifier)


async def test_who_waits_for_a_verifier_can_be_aborted_and_hears_of_its_deadline(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with running_router(tmp_path, {"v": verifier}) as router:
        aborted, late = (
            asyncio.create_task(
                router.generate(text_request(max_tokens=500, request_id=name), timeout_s=limit)
            )
            for name, limit in ((RequestId("aborted"), None), (RequestId("late"), 3.0))
        )
        await until(lambda: len(verifier.live) == 2)
        verifier.lost.set()
        await until(lambda: router.admission.num_waiting == 2)
        router.abort_requests([RequestId("aborted")])
        with pytest.raises(CancelledRequestError):
            await soon(aborted)
        with pytest.raises(DeadlineExceededError):
            await soon(late)
        verifier.restart()
        await assert_all_freed(router, verifier)


@pytest.mark.parametrize(
    ("raised", "reason"), [(ConnectionLostError, "VERIFIER_LOST"), (InternalError, "UNSPECIFIED")]
)
async def test_a_request_whose_sessions_are_lost_again_and_again_is_given_up(
    tmp_path: Path, raised: type[UnavailableError], reason: str
) -> None:
    async with pair(tmp_path, max_failovers=2) as both:

        def poisoned(spec: SessionSpec) -> list[int]:
            raise raised("it happened again")

        both.first.script = both.second.script = poisoned
        with pytest.raises((UnavailableError, InternalError)) as caught:
            await soon(both.router.generate(text_request()))
        assert caught.value.reason == reason
        assert len(both.first.specs) + len(both.second.specs) == 3
        await both.freed()


async def test_nothing_is_placed_on_a_verifier_that_lost_its_device(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:

        def broken(spec: SessionSpec) -> list[int]:
            both.first.hung = True
            raise UnavailableError("the verifier has lost its device", reason="DEVICE_LOST")

        both.first.script = broken
        results = [await both.router.generate(text_request()) for _ in range(3)]
        assert {result.text for result in results} == {"abcabc"}
        assert len(both.first.specs) == 1
        assert sample(both.router, "outrider_verifier_losses_total", verifier="v0") == 1


async def test_two_verifiers_of_one_name_do_not_serve_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as both:
        both.second.change_info(verifier_id="v0")
        await until(lambda: both.router.registry.verifiers["b"].problem)
        assert "verifier id v0 is already used" in both.router.registry.verifiers["b"].problem
        # It is lost under its own name; the verifier whose name it took is not.
        assert sample(both.router, "outrider_verifier_up", verifier="v0") == 1
        assert sample(both.router, "outrider_verifier_up", verifier="v1") == 0
        await asyncio.gather(*(both.router.generate(text_request()) for _ in range(4)))
        assert not both.second.specs
        both.first.lost.set()
        await until(lambda: both.router.registry.verifiers["b"].problem == "")
        assert (await both.router.generate(text_request())).text == "abcabc"


async def test_what_a_verifier_says_of_a_session_that_was_left_reaches_nobody(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        both.first.deaf = True
        task = asyncio.create_task(both.router.generate(text_request(max_tokens=200)))
        await emitted(both.router, 5)
        await both.first.drain(10.0)
        await until(lambda: both.second.live)
        # Both emit the same positions now, on streams that are open.
        assert both.first.live
        result = await soon(task)
        assert result.text == ("abc" * 67)[:200]
        assert result.finish.usage.completion_tokens == 200


async def test_a_verifier_that_was_cut_off_and_comes_back_as_it_was_takes_sessions_again(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as both:
        task = asyncio.create_task(both.router.generate(text_request(max_tokens=400)))
        await emitted(both.router, 5)
        both.first.hung = True
        await until(lambda: both.second.live)
        both.first.hung = False
        await both.up(both.first)
        # The same process, which may still hold the epoch that was given up.
        await both.second.drain(10.0)
        assert (await soon(task)).text == ("abc" * 134)[:400]
        assert [spec.epoch for spec in (*both.first.specs, *both.second.specs)] == [0, 2, 1]
        assert len({spec.session_id for spec in both.first.specs}) == 1
        await both.freed()
