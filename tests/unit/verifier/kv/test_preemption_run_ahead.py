"""Preemption under a runner that is a round ahead, with drafts of its own and with look-ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from tests.fakes.model_runner import FakeRunner
from tests.fakes.target import FakeTarget
from tests.unit.verifier.engine.test_look_ahead import AHEAD, foresee, looking_ahead
from tests.unit.verifier.forced_preemption import preemptions, start_together
from tests.unit.verifier.harness import Rig, good_chain, half_good_chain, make_spec, verifier
from tests.waiting import until

OWN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3)
PLAIN = SpeculationPlan()


@asynccontextmanager
async def short_of_blocks(
    num_blocks: int, *, drafts: int = 3, **settings: Any
) -> AsyncIterator[tuple[Rig, FakeRunner]]:
    """A verifier on a runner that runs ahead and checks that no row goes without its blocks; it
    expects every answer to end at once. At the end nothing is held or in flight."""
    target = FakeTarget(num_blocks=num_blocks)
    runner = FakeRunner(target, drafts=drafts)
    async with verifier(target=target, runner=runner, **settings) as rig:
        lengths: Any = rig.service.core.block_manager.lengths
        lengths.expected_len = lambda emitted, most: emitted
        yield rig, runner
        await rig.idle()
        await until(lambda: not runner.in_flight)
        assert runner.prefixes == {} and runner.suspended == {}
        assert runner.most_in_flight <= 2


def specs_of(count: int, **options: Any) -> list[SessionSpec]:
    """Sessions of all rules that compare tokens, of two priorities."""
    return [
        make_spec(
            f"s{i}",
            prompt=tuple((5 * i + j) % 24 for j in range(3 + 6 * (i % 4))),
            sampling=SamplingParams(temperature=0.9 * (i % 2), seed=i),
            priority=i % 2,
            **{"max_new_tokens": 24 + 4 * (i % 5), **options},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("drafts", [0, 3])
async def test_a_round_in_flight_is_settled_before_its_sessions_are_preempted(
    drafts: int, way: str
) -> None:
    async with short_of_blocks(34, drafts=drafts, preemption=way) as (rig, runner):
        specs = specs_of(10, plan=OWN if drafts else PLAIN, drafter=None)
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert runner.rounds_ahead > 0
        assert preemptions(rig.service) >= 2


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_sessions_with_a_drafter_get_their_texts(way: str) -> None:
    async with short_of_blocks(28, drafts=0, preemption=way) as (rig, _):
        await rig.attach(half_good_chain(rig.target))
        plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4, proposal_timeout_ms=30_000)
        specs = specs_of(10, plan=plan)
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert preemptions(rig.service) >= 2


async def test_a_session_that_is_preempted_among_hits_gets_its_text() -> None:
    async with short_of_blocks(28, drafts=0) as (rig, _):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        specs = specs_of(8, plan=AHEAD)
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert preemptions(rig.service) >= 1
        assert rig.service.core.counters["hit_rounds"] > 0


async def test_hits_on_end_do_not_keep_a_higher_priority_waiting() -> None:
    async with looking_ahead(max_sessions=1) as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        core, lands = rig.service.core, runner.lands
        # From the third hit on the round lasts until the urgent session is there.
        runner.lands = lambda: (
            lands() and (core.counters["hit_rounds"] < 3 or core.counters["sessions"] == 2)
        )
        spec = make_spec(plan=AHEAD, max_new_tokens=250)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: core.counters["hit_rounds"] > 2)
        urgent = make_spec("urgent", plan=PLAIN, drafter=None, priority=1, max_new_tokens=4)
        assert (await rig.run(urgent)).tokens == rig.reference(urgent)
        assert preemptions(rig.service) == 1
        assert (await running).tokens == rig.reference(spec)
