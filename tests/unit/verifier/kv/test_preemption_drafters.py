"""Sessions that are preempted, and what drafters do meanwhile: lie, come, go and fall silent."""

from __future__ import annotations

import asyncio

import pytest

from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from tests.unit.verifier.engine.test_drafter_reassignment import OTHER, PATIENT, Heard
from tests.unit.verifier.exchange.test_hostile_drafters import Disorderly
from tests.unit.verifier.forced_preemption import hold, preemptions, start_together
from tests.unit.verifier.harness import (
    DRAFTER,
    good_chain,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)
from tests.unit.verifier.kv.test_preemption_texts import (
    WAYS,
    one_at_a_time,
    session_of,
    short_of_blocks,
    spec_of,
    urgent,
)
from tests.waiting import until


@pytest.mark.parametrize("way", WAYS)
async def test_old_frames_for_preempted_sessions_change_no_text(way: str) -> None:
    async with short_of_blocks(36, preemption=way, max_preemptions=3) as rig:
        disorder = Disorderly(rig.target, seed=1)
        disorder.drafter = await rig.attach(disorder)
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=50)
        specs = [spec_of(number, plan=plan) for number in range(8)]
        start_together(rig.service, len(specs))
        for spec, result in zip(specs, await rig.run_all(specs), strict=True):
            assert result.error is None and result.tokens == rig.reference(spec)
        assert preemptions(rig.service) > 0
        assert rig.service.core.counters["proposals_stale"] > 0


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("wishes", [[None], [OTHER], [None, OTHER], [None, DRAFTER]], ids=str)
async def test_a_preempted_session_may_go_to_another_drafter_or_to_nobody(
    way: str, wishes: list[DrafterId | None]
) -> None:
    async with one_at_a_time(preemption=way) as rig:
        await rig.attach(half_good_chain(rig.target))
        await rig.attach(good_chain(rig.target), drafter_id=OTHER)
        spec = make_spec(max_new_tokens=60, plan=PATIENT)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=15)
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        running = asyncio.create_task(rig.run(urgent(max_new_tokens=40)))
        await until(lambda: preemptions(rig.service) == 1)
        for count, wish in enumerate(wishes, start=1):
            await heard.move(wish)
            await heard.read(moves=count)
        assert heard.moved == wishes
        release()
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        first = await running
        assert first.tokens == rig.reference(urgent(max_new_tokens=40))
        assert any(heard.proposed[-8:]) is (wishes[-1] is not None)
        await heard.connection.close()


async def test_a_session_that_is_resumed_does_not_wait_for_a_silent_drafter() -> None:
    async with one_at_a_time() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=300)
        spec = make_spec(max_new_tokens=60, plan=plan)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        drafter.muted = True
        counters = rig.service.core.counters
        await until(lambda: counters["drafters_stalled"] == 1)
        await rig.run(urgent())
        assert preemptions(rig.service) == 1
        result = await running
        assert result.tokens == rig.reference(spec)
        assert counters["proposal_timeouts"] == 1


async def test_a_drafter_that_comes_while_its_session_is_preempted_is_told_all() -> None:
    async with one_at_a_time() as rig:
        first = await rig.attach(good_chain(rig.target))
        spec = make_spec(max_new_tokens=60, plan=PATIENT)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        blocking = asyncio.create_task(rig.run(urgent(max_new_tokens=60)))
        await until(lambda: preemptions(rig.service) == 1)
        await first.detach()
        await until(lambda: session_of(rig).link_id is None)
        late = await rig.attach(good_chain(rig.target), incarnation="2")
        release()
        await blocking
        result = await running
        assert result.tokens == rig.reference(spec)
        assert late.starts == 1 and result.last.stats.accepted > 0


async def test_a_flood_for_a_preempted_session_is_cut() -> None:
    async with verifier(max_sessions=1) as rig:
        rig.target.forward_s = 0.002
        disorder = Disorderly(rig.target, seed=2)
        disorder.drafter = drafter = await rig.attach(disorder)
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=50)
        spec = make_spec(max_new_tokens=60, plan=plan)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        blocking = asyncio.create_task(rig.run(urgent(max_new_tokens=200)))
        await until(lambda: preemptions(rig.service) == 1)
        assert drafter.connection is not None
        while rig.service.drafter_connections.links:
            await disorder.send([disorder.past[0]] * 1000)
            await asyncio.sleep(0)
        assert rig.service.read_counters()["drafters_disconnected_flooding"] == 1
        await blocking
        result = await running
        assert result.tokens == rig.reference(spec)
        await rig.idle()
