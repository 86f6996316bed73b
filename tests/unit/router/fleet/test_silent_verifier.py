"""A verifier that answers, accepts sessions and says nothing of them is lost until it makes
progress; one that works on a long prompt is not."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from outrider_router.config import RouterConfig
from outrider_verifier.config import VerifierConfig

from outrider.errors import UnavailableError
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, emitted, pair, text_request
from tests.waiting import soon, until

STALL_S = 0.4


async def test_its_sessions_go_on_elsewhere_and_it_gets_no_more(tmp_path: Path) -> None:
    async with pair(tmp_path, verifier_stall_s=STALL_S) as both:
        task = asyncio.create_task(both.router.generate(text_request(max_tokens=30)))
        await emitted(both.router, 10)
        both.first.gate = asyncio.Event()
        assert (await soon(task)).text == "abc" * 10
        assert sample(both.router, "outrider_failovers_total") == 1
        opened = len(both.first.specs)
        for _ in range(3):
            await soon(both.router.generate(text_request()))
            await asyncio.sleep(0.1)
        assert len(both.first.specs) == opened
        # Progress, or a restart, makes it good again.
        both.first.gate.set()
        both.first.change_info(engine_steps=1)
        await both.up(both.first)
        await both.freed()


async def test_without_another_one_the_wait_for_it_counts_as_part_of_the_failover(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(round_s=0.002)
    async with running_router(
        tmp_path, {"v": verifier}, verifier_stall_s=STALL_S, failover_timeout_s=0.8
    ) as router:
        task = asyncio.create_task(router.generate(text_request(max_tokens=30)))
        await emitted(router, 10)
        verifier.gate = asyncio.Event()
        began = asyncio.get_running_loop().time()
        with pytest.raises(UnavailableError) as refused:
            await soon(task)
        assert refused.value.reason == "VERIFIER_LOST"
        assert asyncio.get_running_loop().time() - began < STALL_S + 0.8
        assert not router.readiness.is_ready
        verifier.gate.set()
        verifier.restart()
        await until(lambda: router.readiness.is_ready)
        await assert_all_freed(router, verifier)


async def test_a_long_prompt_is_no_silence_while_its_engine_makes_steps(tmp_path: Path) -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with running_router(tmp_path, {"v": verifier}, verifier_stall_s=STALL_S) as router:
        task = asyncio.create_task(router.generate(text_request()))
        for steps in itertools.islice(itertools.count(1), 12):
            verifier.change_info(engine_steps=steps)
            await asyncio.sleep(0.1)
        verifier.gate.set()
        assert (await soon(task)).text == "abcabc"
        assert sample(router, "outrider_failovers_total") == 0


def test_the_defaults_keep_what_is_promised() -> None:
    """A gap of 15 s with a spare, a typed error within 30 s without one."""
    verifier = VerifierConfig(model="m")
    router = RouterConfig(model=Path("m"), verifiers=("v:1",))
    assert verifier.stall_s < router.verifier_stall_s <= 13.0
    assert router.failover_timeout_s <= 27.0
