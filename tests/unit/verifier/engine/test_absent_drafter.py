"""Sessions whose drafter is away: rounds run ahead until it comes, and texts stay the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from outrider.spec.sampling import SamplingParams
from tests.fakes.model_runner import FakeFlight, FakeRunner
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import CHAIN, good_chain, half_good_chain, make_spec, verifier
from tests.waiting import until


def pause(flight: FakeFlight) -> None:
    """Of a device that takes a while."""
    time.sleep(0.002)


def _alone_or_over(runner: FakeRunner, before: int, running: Sequence[asyncio.Task[Any]]) -> bool:
    """Whether rounds run ahead again."""
    return runner.rounds_ahead > before or all(task.done() for task in running)


async def test_a_session_whose_drafter_is_away_runs_ahead_until_it_comes() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        runner.before_collect = pause
        spec = make_spec(plan=CHAIN, max_new_tokens=200)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: runner.rounds_ahead > 5)
        await rig.attach(good_chain(target))
        result = await running
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.accepted > 0
        await rig.idle()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_drafter_that_comes_and_goes_all_the_time_changes_nothing_but_speed(
    temperature: float,
) -> None:
    target = FakeTarget(num_blocks=1024)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        runner.before_collect = pause
        sampling = SamplingParams(temperature=temperature, seed=5)
        specs = [
            make_spec(f"s{i}", plan=CHAIN, max_new_tokens=200 + 20 * i, sampling=sampling)
            for i in range(4)
        ]
        running = [asyncio.create_task(rig.run(spec)) for spec in specs]
        comes = 0
        while not all(task.done() for task in running):
            drafter = await rig.attach(half_good_chain(target), incarnation=str(comes))
            comes += 1
            await asyncio.sleep(0.01)
            assert drafter.broken is None
            await drafter.detach()
            await until(lambda: not rig.service.drafter_connections.links)
            await until(partial(_alone_or_over, runner, runner.rounds_ahead, running))
        assert comes > 2
        for spec, result in zip(specs, await asyncio.gather(*running), strict=True):
            assert result.tokens == rig.reference(spec)
            stats = result.last.stats
            assert stats.accepted > 0 and 0 < stats.fallback_rounds < stats.rounds
        await rig.idle()
