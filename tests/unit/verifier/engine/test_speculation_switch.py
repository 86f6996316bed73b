"""Sessions pause and resume speculation as the planner says: texts stay, drafters follow."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.session import Session

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from tests.fakes.model_runner import FakeRunner
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import (
    LONG,
    bushy_tree,
    garbage,
    good_chain,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)


class Alternating(SpeculationPolicy):
    """Changes its mind all the time."""

    def __init__(self) -> None:
        super().__init__(automatic=True, ceiling_s=5.0)
        self._turns = itertools.count()

    @property
    def changed(self) -> bool:
        """Always."""
        return True

    @changed.setter
    def changed(self, value: bool) -> None: ...

    def should_pause(self, session: Session) -> bool:
        """Some rounds so, some rounds so; the very same question may get another answer."""
        return next(self._turns) % 67 < 30


@pytest.mark.parametrize(
    "drafts", [good_chain, half_good_chain, bushy_tree, garbage], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("method", [DraftMethod.EAGLE3, DraftMethod.NGRAM])
async def test_pausing_and_resuming_changes_no_text_and_drafters_follow(
    drafts: object, method: DraftMethod
) -> None:
    async with verifier(planner="automatic") as rig:
        rig.service.core.policy = Alternating()
        await rig.attach(drafts(rig.target))  # type: ignore[operator]
        plan = replace(LONG, method=method, draft_tokens=16)
        specs = [
            make_spec(
                f"s{i}",
                prompt=tuple(range(3, 9 + 7 * i)),
                max_new_tokens=120,
                plan=plan,
                sampling=SamplingParams(temperature=0.5 * i, seed=i),
            )
            for i in range(3)
        ]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.error is None
            assert result.tokens == rig.reference(spec)
        assert rig.service.core.counters["speculation_resumed"] > 2
        stats = [result.last.stats for result in results]
        assert sum(s.paused_rounds for s in stats) > 10
        assert sum(s.proposed for s in stats) > 10
        await rig.idle()


async def test_paused_sessions_run_ahead_and_come_back() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target, drafts=0)
    async with verifier(target=target, runner=runner, planner="automatic") as rig:
        rig.service.core.policy = Alternating()
        await rig.attach(good_chain(target))
        specs = [make_spec(f"s{i}", max_new_tokens=300, plan=LONG) for i in range(2)]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.tokens == rig.reference(spec)
        stats = [result.last.stats for result in results]
        assert sum(s.paused_rounds for s in stats) > 20
        assert sum(s.accepted for s in stats) > 20
        assert runner.rounds_ahead > 0
        await rig.idle()


async def test_a_drafter_hears_of_a_session_of_a_paused_kind_when_it_is_to_draft_for_it() -> None:
    async with verifier(planner="automatic") as rig:
        core, pauses = rig.service.core, True
        core.policy.should_pause = lambda session: pauses  # type: ignore[method-assign]
        rig.target.forward_s = 0.002
        drafter = await rig.attach(good_chain(rig.target))
        specs = [make_spec(name, max_new_tokens=400, plan=LONG) for name in ("s", "t")]
        running = []
        for spec in specs:
            running.append(asyncio.create_task(rig.run(spec)))
            await mid_stream(rig, spec.session_id)
        late = core.sessions[specs[1].session_id]
        assert late.is_speculation_off and late.link_id is None and drafter.starts == 0
        pauses, core.policy.changed = False, True
        results = await asyncio.gather(*running)
        assert drafter.starts == 2 and drafter.broken is None
        for spec, result in zip(specs, results, strict=True):
            assert result.tokens == rig.reference(spec)
            assert result.last.stats.paused_rounds > 2 and result.last.stats.accepted > 10
        await rig.idle()


async def test_a_plan_that_changes_while_paused_starts_the_drafter_anew() -> None:
    async with verifier(planner="automatic") as rig:
        rig.target.forward_s = 0.002
        policy = Alternating()
        rig.service.core.policy = policy
        await rig.attach(half_good_chain(rig.target))
        spec = make_spec(max_new_tokens=600, plan=LONG)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        for plan in (replace(LONG, draft_tokens=2), SpeculationPlan(), LONG) * 3:
            await rig.service.set_plan(spec.session_id, plan)
            await asyncio.sleep(0.015)
        assert (await running).tokens == rig.reference(spec)
        await rig.idle()
