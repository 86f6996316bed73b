"""A session that was paused for good keeps no features: nothing else of it is any different."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from outrider_verifier.planner import feature_retention
from outrider_verifier.planner.load_stats import LoadStats, RoundSample
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.planner.workload_stats import WorkloadClass, WorkloadStats
from outrider_verifier.state.commands import SetDrafter
from outrider_verifier.state.session import Session

from outrider.ids import DrafterId
from outrider.spec.decoding_mode import DecodingMode
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.speculation.cost_table import CostTable
from outrider.speculation.measurements import RoundObservation
from outrider.speculation.speculation_controller import SpeculationController
from tests.fakes.scripted_drafter import ScriptedDrafter
from tests.unit.verifier.harness import (
    DRAFTER,
    LONG,
    Result,
    Rig,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)
from tests.waiting import until

OTHER = DrafterId("drafter-1")
TOKENS = 250
LOOKUPS = replace(LONG, method=DraftMethod.NGRAM)


class Told(SpeculationPolicy):
    """Does as it is told; sessions that were let go never draft, as ever."""

    plain = False
    feature_retention = False

    def should_pause(self, session: Session) -> bool:
        """As told."""
        return self.plain or (
            session.speculation_state is not None and session.speculation_state.lacks_features
        )

    def should_drop_features(self, session: Session) -> bool:
        """As told."""
        return self.lean and session.is_speculation_off and session.keeps_features

    def tell(self, *, plain: bool, lean: bool = False) -> None:
        """From the next round on."""
        self.plain, self.lean, self.changed = plain, lean, True


@dataclass
class Stage:
    """A verifier whose policy does as it is told, and its drafter."""

    rig: Rig
    policy: Told
    drafter: ScriptedDrafter

    async def begin(self, name: str = "s", **other: Any) -> asyncio.Task[Result]:
        """A session that has run some rounds."""
        spec = make_spec(name, max_new_tokens=TOKENS, plan=LONG, **other)
        task = asyncio.create_task(self.rig.run(spec))
        await mid_stream(self.rig, name)
        return task

    def session(self, name: str = "s") -> Session:
        """One that is being served."""
        found = [s for s in self.rig.service.core.sessions.values() if s.session_id == name]
        return found[0]

    async def let_go(self, name: str = "s") -> None:
        """Wait until it keeps nothing any more."""
        self.policy.tell(plain=True, lean=True)
        await until(lambda: self.session(name).has_dropped_features)

    def used_bytes(self) -> int:
        """By features."""
        store = self.rig.service.core.store
        assert store is not None
        return store.used_bytes


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """Everything set up."""
    async with verifier(planner="automatic") as rig:
        rig.target.forward_s = 0.002
        policy = Told(automatic=True, ceiling_s=5.0)
        rig.service.core.policy = policy
        drafter = await rig.attach(half_good_chain(rig.target))
        yield Stage(rig, policy, drafter)
        await rig.idle()


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, seed=3)])
async def test_it_says_what_it_would_and_its_drafter_is_told_goodbye(
    sampling: SamplingParams,
) -> None:
    async with stage() as on:
        running = await on.begin(sampling=sampling)
        assert on.used_bytes() > 0
        await on.let_go()
        await until(lambda: bool(on.drafter.ended))
        assert on.used_bytes() == 0 and not on.session().keeps_features
        # Others are drafted for again; it is not.
        on.policy.tell(plain=False)
        result = await running
        assert result.tokens == on.rig.reference(
            make_spec(max_new_tokens=TOKENS, sampling=sampling)
        )
        assert on.drafter.starts == 1
        assert result.last.stats.accepted > 0 and result.last.stats.paused_rounds > 10
        assert on.rig.service.core.counters["features_dropped_sessions"] == 1


async def test_who_begins_then_has_none_from_the_start_and_who_begins_later_has_all() -> None:
    async with stage() as on:
        first = await on.begin("first")
        await on.let_go("first")
        second = await on.begin("second")
        assert on.session("second").has_dropped_features and on.used_bytes() == 0
        on.policy.tell(plain=False)
        third = await on.begin("third")
        assert not on.session("third").has_dropped_features and on.used_bytes() > 0
        results = await asyncio.gather(first, second, third)
        told = [result.last.stats for result in results]
        assert told[1].proposed == 0 and told[2].accepted > 0
        assert on.drafter.starts == 2 and on.drafter.broken is None
        for result in results:
            assert result.tokens == on.rig.reference(make_spec(max_new_tokens=TOKENS))


async def test_a_drafter_that_comes_back_is_not_given_what_it_cannot_follow() -> None:
    async with stage() as on:
        running = await on.begin()
        await on.let_go()
        await on.drafter.detach()
        again = await on.rig.attach(half_good_chain(on.rig.target), incarnation="2")
        on.policy.tell(plain=False)
        result = await running
        assert result.tokens == on.rig.reference(make_spec(max_new_tokens=TOKENS))
        assert again.starts == 0
        assert result.last.stats.paused_rounds > 10


async def test_another_plan_is_carried_out_where_it_needs_no_features() -> None:
    async with stage() as on:
        running = await on.begin()
        await on.let_go()
        name = on.session().session_id
        # Not refused: whether it drafts is for the planner.
        await on.rig.service.set_plan(name, replace(LONG, draft_tokens=2))
        await until(lambda: on.session().is_speculation_off)
        on.policy.lean = False
        await on.rig.service.set_plan(name, SpeculationPlan())
        on.policy.tell(plain=False)
        await on.rig.service.set_plan(name, LOOKUPS)
        await until(lambda: on.drafter.starts == 2)
        result = await running
        assert result.tokens == on.rig.reference(make_spec(max_new_tokens=TOKENS))


async def test_it_goes_to_another_drafter_as_others_do() -> None:
    async with stage() as on:
        other = await on.rig.attach(
            half_good_chain(on.rig.target), drafter_id=OTHER, incarnation="2"
        )
        running = await on.begin()
        await on.let_go()
        core, session = on.rig.service.core, on.session()
        for drafter_id in (OTHER, DRAFTER, None, OTHER):
            core.handle_command(SetDrafter(session.session_id, session.ticket, drafter_id), 0.0)
            assert session.spec.drafter_id == drafter_id
        assert core.counters["moves_refused"] == 0
        result = await running
        assert result.tokens == on.rig.reference(make_spec(max_new_tokens=TOKENS))
        assert other.starts == 0


# ---- when features are kept no more -------------------------------------------------------------


def loads(features_us: float | None) -> LoadStats:
    """At load 3, rounds of a millisecond; the device takes so long for features, if it is known."""

    def times(rows: int, *, own: bool, chunks: int = 0, featured: bool = False) -> float | None:
        return None if features_us is None else 0.001 + 1e-6 * features_us * featured

    made = LoadStats(times, CostTable())
    made.begin_round(8)
    for _ in range(20):
        made.observe_round(RoundSample(8, 0, 0, 0.0015))
    return made


def left() -> SpeculationController:
    """One in which plain rounds were seen and are in force."""
    made = SpeculationController(active_mode=DecodingMode.PLAIN)
    made.observe_round(
        DecodingMode.PLAIN, RoundObservation(rows=8, tokens=8, squares=8, seconds=0.012, sessions=8)
    )
    return made


def known(method: DraftMethod = DraftMethod.EAGLE3) -> WorkloadStats:
    return WorkloadStats(WorkloadClass(DRAFTER, method, 4, 1, Rule.GREEDY, 0.0))


def test_features_are_kept_where_they_cost_little() -> None:
    plain = left()
    # The host takes 58 us more for eight sessions.
    assert loads(10.0).feature_cost_s == pytest.approx(68e-6)
    assert loads(10.0).feature_cost_share == pytest.approx(68e-6 / 1.5e-3)
    assert feature_retention.should_drop_features(known(), plain, loads(10.0))
    assert feature_retention.should_drop_features(known(), plain, loads(200.0))
    assert not feature_retention.should_drop_features(known(DraftMethod.NGRAM), plain, loads(200.0))
    assert not feature_retention.should_drop_features(
        known(), SpeculationController(), loads(200.0)
    )
    # A round of a large model takes as long again for nothing.
    large = loads(10.0)
    for _ in range(64):
        large.observe_round(RoundSample(8, 0, 0, 0.004))
    assert not feature_retention.should_drop_features(known(), plain, large)
    # Processors are not measured at the start.
    assert not feature_retention.should_drop_features(known(), plain, loads(None))
    assert loads(None).feature_cost_share == 0.0


def test_sessions_keep_them_for_a_while_once_speculation_is_due() -> None:
    plain, mine, busy = left(), known(), loads(200.0)
    feature_retention.collect_features(mine, busy)
    kept = 0
    while not feature_retention.should_drop_features(mine, plain, busy):
        busy.observe_round(RoundSample(8, 0, 0, 0.0015))
        kept += 1
    assert kept == feature_retention.COLLECT_ROUNDS


def test_what_it_costs_to_have_them_again_is_part_of_the_price_of_a_trial() -> None:
    assert feature_retention.preparation_s(known(), loads(None)) == 0.0
    assert feature_retention.preparation_s(known(), loads(200.0)) == pytest.approx(128 * 258e-6)
    # Others need none.
    for method in (DraftMethod.NGRAM, DraftMethod.MODEL):
        assert feature_retention.preparation_s(known(method), loads(200.0)) == 0.0


def test_nobody_is_let_go_by_a_verdict_of_another_load_or_of_one_that_just_began() -> None:
    plain, busy = left(), loads(200.0)
    assert feature_retention.should_drop_features(known(), plain, busy)
    assert not feature_retention.should_drop_features(
        known(), SpeculationController.from_other_load(plain), busy
    )
    # The last session of a wave, or none.
    busy.begin_round(0)
    assert not feature_retention.should_drop_features(known(), plain, busy)
    for _ in range(16):
        busy.observe_round(RoundSample(1, 0, 0, 0.001))
    assert feature_retention.should_drop_features(known(), plain, busy)


def test_sessions_gather_for_a_trial_only_so_long() -> None:
    controller, due = left(), 0
    for _ in range(4000):
        seen = RoundObservation(
            rows=8, tokens=8, squares=8, seconds=0.012, sessions=8, eligible_share=0.5
        )
        controller.observe_round(DecodingMode.PLAIN, seen)
        due += controller.is_probe_due
        assert controller.current_mode is DecodingMode.PLAIN
    assert 256 <= due < 0.5 * 4000


def test_a_trial_for_which_nobody_is_left_is_over() -> None:
    controller = left()
    while controller.current_mode is DecodingMode.PLAIN:
        controller.observe_round(
            DecodingMode.PLAIN,
            RoundObservation(rows=8, tokens=8, squares=8, seconds=0.012, sessions=8),
        )
    few = RoundObservation(
        rows=8, tokens=8, squares=8, seconds=0.012, sessions=8, eligible_share=0.0
    )
    controller.observe_round(DecodingMode.PLAIN, few)
    assert controller.current_mode is controller.active_mode is DecodingMode.PLAIN


def test_what_features_take_is_no_part_of_a_plain_round() -> None:
    seen = loads(200.0)
    before = seen.plain_round_s
    for _ in range(64):
        seen.observe_round(
            RoundSample(
                8,
                0,
                0,
                before + seen.feature_cost_s,
                has_in_process_drafts=False,
                keeps_features=True,
            )
        )
    assert seen.plain_round_s == pytest.approx(before, rel=0.01)


def test_between_two_loads_at_which_both_were_seen_to_lose_nobody_keeps_them() -> None:
    busy, mine = loads(200.0), known()
    mine.controllers = {3: left(), 2: left()}
    busy.begin_round(3)
    for _ in range(40):
        busy.begin_round(3)
        busy.observe_round(RoundSample(3, 0, 0, 0.0015))
    assert busy.load == 2 and busy.is_steady
    busy.begin_round(8)
    assert busy.load == 3 and not busy.is_steady
    assert feature_retention.should_drop_features(mine, mine.controllers[3], busy)
    # Of the load before it nothing is known but by this one, or drafts are in force there.
    for other in (SpeculationController.from_other_load(left()), SpeculationController()):
        mine.controllers[2] = other
        assert not feature_retention.should_drop_features(mine, mine.controllers[3], busy)
