"""Sessions draft between devices (again) once a drafter exchanges with their verifier, and whatever
they go through for that changes no text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from typing import Any

import pytest
from outrider_verifier.planner.draft_recovery import MAX_RECOMPUTING
from outrider_verifier.state.session import Session

from outrider.engine.swap import SwapSpace
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import SessionSpec
from tests.fakes.model_runner import FakeRunner
from tests.fakes.target import FakeTarget
from tests.unit.verifier.forced_preemption import preempt_often, preemptions, start_together
from tests.unit.verifier.harness import Rig, good_chain, make_spec, verifier
from tests.waiting import until

REMOTE = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3, proposal_timeout_ms=30_000)
SESSIONS = 5


class RemotelyDraftedRunner(FakeRunner):
    """A runner whose drafter is elsewhere: KV that was swapped comes back without the draft's."""

    def __init__(self, target: FakeTarget) -> None:
        super().__init__(target)
        self._lacking: set[int] = set()

    def resume_session(self, session: Session) -> bool:
        kept = super().resume_session(session)
        (self._lacking.add if kept else self._lacking.discard)(session.ticket)
        return kept

    def suspend_session(self, session: Session, swap: SwapSpace | None) -> bool:
        self._lacking.discard(session.ticket)
        return super().suspend_session(session, swap)

    def has_draft_kv(self, session: Session) -> bool:
        return super().has_draft_kv(session) and session.ticket not in self._lacking


class ExchangingRig:
    """A verifier, and an exchange that opens and is lost as a test says."""

    def __init__(self, rig: Rig, runner: RemotelyDraftedRunner) -> None:
        self.rig, self.runner, self.core = rig, runner, rig.service.core
        self.is_open = False
        self.most_recomputing = 0
        block_manager: Any = self.core.block_manager
        # Where rounds take no time, nothing is worth it.
        block_manager.recompute_s = lambda session: 0.0
        self.core.remote_draft_length = lambda spec: 3 if self.is_open else 0

    def open(self) -> None:
        self.is_open = True
        self.core.open_remote_drafts()

    def lose(self) -> None:
        self.is_open = False
        self.core.forget_remote_drafts()

    @property
    def recoveries(self) -> int:
        return self.core.counters["draft_recoveries"]

    def before_rounds(self, act: Callable[[], None]) -> None:
        """Have the engine's thread do something before each round."""
        block_manager: Any = self.core.block_manager
        ready = block_manager.prepare_round

        def prepare(now: float, *, touched: int, in_flight: Container[SessionId]) -> bool:
            running = block_manager.running.values()
            recomputing = sum(bool(s.emitted and s.prefill_left) for s in running)
            self.most_recomputing = max(self.most_recomputing, recomputing)
            act()
            return bool(ready(now, touched=touched, in_flight=in_flight))

        block_manager.prepare_round = prepare

    def once(self, when: Callable[[], bool], act: Callable[[], None]) -> None:
        """Do something before the first round for which `when` is true."""
        left = [act]
        self.before_rounds(lambda: left.pop()() if left and when() else None)

    def emitted(self, count: int) -> bool:
        """Whether all sessions run and have emitted so many tokens."""
        sessions = self.core.sessions.values()
        return len(sessions) == SESSIONS and all(s.emitted >= count for s in sessions)

    async def check(self, specs: list[SessionSpec]) -> None:
        """Serve all; the texts are right."""
        start_together(self.rig.service, len(specs))
        results = await self.rig.run_all(specs)
        expected = [self.rig.reference(spec) for spec in specs]
        assert [result.tokens for result in results] == expected


@asynccontextmanager
async def exchanging(**settings: Any) -> AsyncIterator[ExchangingRig]:
    target = FakeTarget(num_blocks=1024)
    runner = RemotelyDraftedRunner(target)
    async with verifier(target=target, runner=runner, **settings) as rig:
        yield ExchangingRig(rig, runner)
        await rig.idle()
        await until(lambda: not runner.in_flight)


def specs_of(count: int = SESSIONS, **options: Any) -> list[SessionSpec]:
    return [
        make_spec(
            f"s{i}",
            prompt=tuple((5 * i + j) % 24 for j in range(20 + 6 * i)),
            sampling=SamplingParams(temperature=0.9 * (i % 2), seed=i),
            plan=REMOTE,
            **{"max_new_tokens": 150, **options},
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("prefix_cache", [False, True])
async def test_all_sessions_get_drafts_a_few_at_a_time(prefix_cache: bool) -> None:
    async with exchanging(prefix_cache=prefix_cache) as rig:
        rig.once(lambda: rig.emitted(5), rig.open)
        await rig.check(specs_of())
        assert rig.recoveries == SESSIONS
        assert rig.core.counters["proposed_tokens"] > 0
        assert 1 <= rig.most_recomputing <= MAX_RECOMPUTING
        # Their own blocks are there, but without the draft's KV.
        assert rig.core.counters["prefix_cache_hit_tokens"] == 0
        assert preemptions(rig.rig.service) == 0


async def test_sessions_draft_again_whenever_their_drafter_returns() -> None:
    async with exchanging() as rig:
        rounds = [0]

        def flap() -> None:
            rounds[0] += 1
            if rounds[0] % 40 == 20 and rig.emitted(2):
                rig.open()
            elif rounds[0] % 40 == 0 and rig.is_open:
                rig.lose()

        rig.before_rounds(flap)
        await rig.check(specs_of(max_new_tokens=250))
        assert rig.recoveries > SESSIONS
        assert rig.most_recomputing <= MAX_RECOMPUTING


async def test_sessions_that_begin_later_and_those_near_their_end_are_not_recomputed() -> None:
    async with exchanging() as rig:
        rig.once(lambda: rig.core.counters["rounds"] > 12, rig.open)
        await rig.check(specs_of(max_new_tokens=15))
        assert rig.recoveries == 0
        late = make_spec("late", plan=REMOTE, max_new_tokens=60)
        before = rig.core.counters["proposed_tokens"]
        assert (await rig.rig.run(late)).tokens == rig.rig.reference(late)
        assert rig.core.counters["proposed_tokens"] > before and rig.recoveries == 0


async def test_sessions_that_were_swapped_get_their_drafts_back() -> None:
    async with exchanging(preemption="swap") as rig:
        rig.open()
        preempt_often(rig.rig.service, every=20, most=2)
        await rig.check(specs_of(max_new_tokens=250))
        assert rig.core.counters["preemptions_swap"] > 0
        assert rig.recoveries > 0


async def test_under_a_planner_that_decides_texts_are_the_same() -> None:
    async with exchanging(planner="automatic") as rig:
        rig.once(lambda: rig.emitted(5), rig.open)
        await rig.check(specs_of())


async def test_sessions_that_wait_begin_with_drafts() -> None:
    async with exchanging(preemption="recompute", max_sessions=2) as rig:
        waiting = rig.core.block_manager.waiting
        rig.once(lambda: len(waiting) == SESSIONS - 2 and rig.core.counters["rounds"] > 9, rig.open)
        await rig.check(specs_of())
        # The others had nothing to recompute.
        assert rig.recoveries == 2


async def test_sessions_that_draft_by_messages_go_over() -> None:
    async with exchanging() as rig:
        await rig.rig.attach(good_chain(rig.rig.target), methods=(DraftMethod.EAGLE3,))
        rig.once(lambda: rig.emitted(20), rig.open)
        await rig.check(specs_of(max_new_tokens=400))
        assert rig.recoveries == SESSIONS
        assert rig.core.counters["proposals_used"] > 0


async def test_a_session_for_which_its_drafter_has_no_draft_any_more_is_recomputed() -> None:
    async with exchanging() as rig:
        rig.open()
        recovery = rig.core.draft_recovery

        def refuse() -> None:
            for session in rig.core.sessions.values():
                if (
                    session.session_id == "s0"
                    and session.round_id > session.drafter_record.last_undrafted_round
                ):
                    recovery.record_undrafted_round(session)

        rig.before_rounds(refuse)
        await rig.check(specs_of())
        assert rig.recoveries >= 1


async def test_where_blocks_are_shared_and_none_is_free_a_session_goes_on_as_it_is() -> None:
    async with exchanging() as rig:
        block_manager: Any = rig.core.block_manager
        block_manager.can_recompute = lambda session: False
        rig.once(lambda: rig.emitted(5), rig.open)
        await rig.check(specs_of())
        assert rig.recoveries == 0
