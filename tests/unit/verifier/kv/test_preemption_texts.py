"""Sessions that are preempted get the texts that they would have had, and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from outrider_verifier.config import VerifierConfig
from outrider_verifier.state.session import Session

from outrider.errors import InvalidRequestError, ResourceExhaustedError, UnavailableError
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import FinishReason, Proposal, SessionSpec
from tests.fakes.scripted_drafter import ProposeFn
from tests.fakes.target import FakeTarget
from tests.unit.verifier.engine.test_look_ahead import AHEAD, foresee
from tests.unit.verifier.forced_preemption import hold, preempt_often, preemptions, start_together
from tests.unit.verifier.harness import (
    CHAIN,
    TREE,
    Rig,
    bushy_tree,
    garbage,
    good_chain,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)
from tests.waiting import until

PLAIN = SpeculationPlan()
NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4, proposal_timeout_ms=30_000)
DRAFTS: dict[str, tuple[Callable[[FakeTarget], ProposeFn], SpeculationPlan]] = {
    "good chain": (good_chain, CHAIN),
    "half good chain": (half_good_chain, CHAIN),
    "tree": (bushy_tree, TREE),
    "garbage": (garbage, TREE),
    "n-gram": (half_good_chain, NGRAM),
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=0.8, seed=11),
    "penalties": SamplingParams(
        temperature=1.1, repetition_penalty=1.2, presence_penalty=0.3, banned_ids=(2, 7), seed=5
    ),
}
WAYS = ["swap", "recompute", "auto"]


@asynccontextmanager
async def short_of_blocks(num_blocks: int, **settings: Any) -> AsyncIterator[Rig]:
    """A verifier with so few blocks of 4 tokens that expects every answer to end at once, so that
    it lets in more than fit; at the end nothing is held of any kind."""
    async with verifier(target=FakeTarget(num_blocks=num_blocks), **settings) as rig:
        lengths: Any = rig.service.core.block_manager.lengths
        lengths.expected_len = lambda emitted, most: emitted
        yield rig
        await rig.idle()


@asynccontextmanager
async def one_at_a_time(**settings: Any) -> AsyncIterator[Rig]:
    """A verifier that runs one session, so that any of a higher priority preempts it."""
    async with verifier(max_sessions=1, **settings) as rig:
        rig.target.forward_s = 0.002
        yield rig
        await rig.idle()


def spec_of(number: int, **options: Any) -> SessionSpec:
    """A session of up to 24 tokens of prompt and 44 of output, all different."""
    return make_spec(
        f"s{number}",
        prompt=tuple((7 * number + i) % 24 for i in range(1 + 5 * number % 24)),
        **{"max_new_tokens": 20 + 3 * (number % 9), **options},
    )


def urgent(name: str = "urgent", **options: Any) -> SessionSpec:
    """A plain session that goes before all others."""
    return make_spec(name, **{"drafter": None, "plan": PLAIN, "priority": 1, **options})


def session_of(rig: Rig, name: str = "s") -> Session:
    """A session being served."""
    return rig.service.core.sessions[SessionId(name)]


def follow_preemptions(rig: Rig) -> dict[SessionId, int]:
    """How often each session is preempted from now on."""
    most: dict[SessionId, int] = {}
    block_manager: Any = rig.service.core.block_manager
    act = block_manager.preempt_session

    def preempt_and_note(session: Session, now: float) -> None:
        act(session, now)
        most[session.session_id] = session.preemption.count

    block_manager.preempt_session = preempt_and_note
    return most


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafts", DRAFTS)
async def test_a_quarter_of_the_blocks_gives_the_same_texts(drafts: str, way: str) -> None:
    make, plan = DRAFTS[drafts]
    # Twelve sessions of about 16 blocks each, with their slack.
    async with short_of_blocks(36, preemption=way, max_preemptions=3) as rig:
        most = follow_preemptions(rig)
        await rig.attach(make(rig.target))
        specs = [
            spec_of(i, plan=plan, sampling=list(SAMPLINGS.values())[i % 3], priority=i % 3 - 1)
            for i in range(12)
        ]
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.error is None
            assert result.tokens == rig.reference(spec)
            assert result.last.finish_reason is FinishReason.LENGTH
        # How many there are is a matter of when proposals come.
        assert preemptions(rig.service) >= 1
        assert 1 <= max(most.values()) <= 3
        assert rig.service.core.counters["resumed_preemption"] == preemptions(rig.service)


async def test_copies_are_fetched_one_at_a_time_and_rounds_go_on_meanwhile() -> None:
    async with verifier(preemption="swap") as rig:
        runner: Any = rig.service.core.runner
        block_manager: Any = rig.service.core.block_manager
        fetch, asked, late = runner.prefetch_session, list[Session](), list[Session]()
        prepare, at_a_time = block_manager.prepare_round, [0]

        def count_fetches(now: float, **others: Any) -> bool:
            before = len(late)
            ready = prepare(now, **others)
            at_a_time.append(len(late) - before)
            return bool(ready)

        def slow_fetch(session: Session) -> bool:
            if not session.preemption.count:
                return True
            # As on a device: asking for another copy forgets the one that was on its way.
            if asked[-1:] != [session]:
                asked[:] = []
            asked.append(session)
            if len(asked) < 4:
                late.append(session)
                return False
            return bool(fetch(session))

        runner.prefetch_session, block_manager.prepare_round = slow_fetch, count_fetches
        preempt_often(rig.service, every=2)
        specs = [spec_of(i, plan=PLAIN, drafter=None) for i in range(6)]
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert late and max(at_a_time) == 1
        assert rig.service.core.counters["preemptions_swap"] >= 6
        await rig.idle()


async def test_a_session_that_is_preempted_among_hits_gets_its_text() -> None:
    # Room for the longest session and little more: whenever which drafts come, some do not fit.
    async with short_of_blocks(24) as rig:
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        specs = [spec_of(i, plan=AHEAD) for i in range(8)]
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert preemptions(rig.service) >= 1
        assert rig.service.core.counters["hit_rounds"] > 0


async def test_sessions_that_come_and_go_with_all_priorities_get_their_texts() -> None:
    rng = random.Random(5)
    async with short_of_blocks(40, max_sessions=5, priority_aging_s=0.05) as rig:
        most = follow_preemptions(rig)
        await rig.attach(half_good_chain(rig.target))
        rig.target.forward_s = 0.001

        async def one(number: int) -> None:
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            spec = spec_of(number, priority=rng.randrange(-3, 4))
            got: list[int] = []
            leaves = number % 4 == 3
            async with aclosing(rig.service.open_session(spec)) as events:
                async for event in events:
                    got += event.tokens
                    if leaves and len(got) > number % 11:
                        break
            expected = rig.reference(spec)
            assert got == (expected[: len(got)] if leaves else expected)

        await asyncio.gather(*(one(number) for number in range(40)))
        assert preemptions(rig.service) > 0
        assert max(most.values()) <= 4


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_preempted_in_the_middle_of_its_prompt_a_session_goes_on_correctly(way: str) -> None:
    prompt = tuple(i % 24 for i in range(60))
    async with verifier(max_sessions=2, preemption=way) as rig:
        rig.target.forward_s = 0.01
        await rig.attach(half_good_chain(rig.target))
        # Shares a round of eight prompt tokens, so that what is filled again is cut elsewhere.
        first = asyncio.create_task(rig.run(urgent("first", prompt=(1,) * 13, max_new_tokens=80)))
        spec = make_spec(prompt=prompt, max_new_tokens=40)
        core = rig.service.core
        hold(rig.service, lambda: core.counters["sessions"] < 2)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: spec.session_id in core.sessions)
        session = session_of(rig)
        # It has a part of its prompt when the urgent one comes.
        hold(rig.service, lambda: session.written_positions >= 16 and core.counters["sessions"] < 3)
        await until(lambda: session.written_positions >= 16)
        assert session.written_positions % 8
        other = await rig.run(urgent(max_new_tokens=2))
        assert other.tokens == rig.reference(urgent(max_new_tokens=2))
        assert session.preemption.count == 1
        await until(lambda: session.emitted > 3)
        store = rig.service.core.store
        assert store is not None
        kept = np.concatenate(store.read(session.handle, 0, 60))
        expected = [2 * rig.target.feature(prompt[: end + 1]) for end in range(60)]
        assert np.array_equal(kept, np.stack(expected))
        result = await running
        assert result.tokens == rig.reference(spec)
        # Its drafter has checked that features came without a gap, each once.
        assert result.last.stats.proposed > 0
        await first
        await rig.idle()


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_a_proposal_that_came_meanwhile_is_used_at_once(way: str) -> None:
    async with one_at_a_time(preemption=way) as rig:
        drafter = await rig.attach(good_chain(rig.target))
        drafter.muted = True
        spec = make_spec(
            plan=SpeculationPlan(
                method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=60_000
            )
        )
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: spec.session_id in drafter.sessions)
        followed = drafter.sessions[spec.session_id]
        await until(lambda: len(followed.tokens) > len(spec.token_ids))
        session = session_of(rig)
        digest = followed.digest
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        other = asyncio.create_task(rig.run(urgent(max_new_tokens=60)))
        await until(lambda: session.is_waiting)
        drafter.muted = False
        tree = good_chain(rig.target)(followed)
        assert tree is not None and not isinstance(tree, tuple)
        handle = next(h for h, name in drafter.names.items() if name == spec.session_id)
        early = Proposal(
            handle=handle, prefix_digest=digest, prefix_len=len(followed.tokens), tree=tree
        )
        await drafter.send(early)
        await until(lambda: rig.service.core.num_proposals == 1)
        assert session.is_waiting
        release()
        await other
        result = await running
        assert result.tokens == rig.reference(spec)
        # Every round had a draft, the first one after the preemption the one that had waited.
        assert result.last.stats.fallback_rounds == 0
        assert result.last.stats.rounds == 3
        assert rig.service.core.counters["proposal_timeouts"] == 0


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_a_session_that_waits_for_a_proposal_waits_on_after_a_preemption(way: str) -> None:
    async with one_at_a_time(preemption=way) as rig:
        drafter = await rig.attach(good_chain(rig.target))
        drafter.muted = True
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=150)
        spec = make_spec(plan=plan, max_new_tokens=3)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: len(drafter.sessions) == 1)
        session = session_of(rig)
        await until(lambda: session.emitted == 1)
        await rig.run(urgent(max_new_tokens=30))
        assert session.preemption.count == 1
        result = await running
        assert result.tokens == rig.reference(spec)
        # The proposal timeout began anew, for nobody waited while it had no KV.
        assert rig.service.core.counters["proposal_timeouts"] == 1
        assert time.monotonic() - session.preemption.resumed_at >= 0.15


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_closed_while_it_waits_a_session_leaves_nothing_behind(way: str) -> None:
    async with one_at_a_time(preemption=way) as rig:
        await rig.attach(good_chain(rig.target))
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=400)))
        await mid_stream(rig)
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        other = asyncio.create_task(rig.run(urgent(max_new_tokens=100)))
        await until(lambda: session_of(rig).is_waiting)
        assert (rig.service.core.block_manager.swapped_bytes > 0) is (way == "swap")
        await rig.service.close_session(SessionId("s"))
        assert rig.service.core.block_manager.swapped_bytes == 0
        release()
        assert (await running).last.finish_reason is FinishReason.CANCELLED
        assert (await other).tokens == rig.reference(urgent(max_new_tokens=100))


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_a_waiting_session_may_change_its_plan_and_lose_and_find_its_drafter(
    way: str,
) -> None:
    async with one_at_a_time(preemption=way) as rig:
        first = await rig.attach(half_good_chain(rig.target))
        spec = make_spec(max_new_tokens=60)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        session = session_of(rig)
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        other = asyncio.create_task(rig.run(urgent(max_new_tokens=20)))
        await until(lambda: session.is_waiting)
        await first.detach()
        await until(lambda: session.link_id is None)
        await rig.service.set_plan(SessionId("s"), PLAIN)
        second = await rig.attach(half_good_chain(rig.target))
        await rig.service.set_plan(SessionId("s"), CHAIN)
        await until(lambda: session.link_id is not None)
        # The new one was told all, features of positions without KV included.
        followed = second.sessions[SessionId("s")]
        await until(lambda: len(followed.features) == session.length - 1)
        assert session.is_waiting
        release()
        await other
        assert (await running).tokens == rig.reference(spec)


async def test_a_session_whose_turn_has_not_come_is_told_of_nothing_and_can_leave() -> None:
    async with one_at_a_time() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        running = asyncio.create_task(rig.run(make_spec("a", max_new_tokens=200)))
        await until(lambda: rig.service.core.num_sessions == 1)
        waiting = asyncio.create_task(rig.run(make_spec("b")))
        await until(lambda: SessionId("b") in drafter.sessions)
        assert session_of(rig, "b").is_waiting and not drafter.sessions[SessionId("b")].verdicts
        info = await rig.service.info()
        assert (info.sessions, info.waiting_sessions) == (2, 1)
        await rig.service.close_session(SessionId("b"))
        assert (await waiting).last.finish_reason is FinishReason.CANCELLED
        assert (await running).error is None


async def test_more_than_may_wait_are_refused() -> None:
    async with one_at_a_time(max_waiting=1) as rig:
        specs = [urgent(f"s{i}", max_new_tokens=40, priority=0) for i in range(2)]
        release = hold(rig.service, lambda: True)
        tasks = [asyncio.create_task(rig.run(spec)) for spec in specs]
        await until(lambda: rig.service.core.num_sessions == 2)
        refused = await rig.run(urgent("s2"))
        release()
        assert isinstance(refused.error, ResourceExhaustedError)
        assert refused.error.reason == "SESSIONS_EXHAUSTED"
        for task, spec in zip(tasks, specs, strict=True):
            assert (await task).tokens == rig.reference(spec)


async def test_sessions_that_wait_end_with_the_verifier() -> None:
    async with verifier(max_sessions=1) as rig:
        rig.target.forward_s = 0.002
        tasks = [
            asyncio.create_task(rig.run(make_spec(f"s{i}", drafter=None, max_new_tokens=900)))
            for i in range(3)
        ]
        await until(lambda: rig.service.core.num_sessions == 3)
        await rig.service.stop()
        results = await asyncio.gather(*tasks)
        assert all(isinstance(result.error, UnavailableError) for result in results)
        assert rig.target.pool.free_blocks == rig.target.pool.total_blocks


async def test_nobody_is_preempted_where_that_is_not_allowed() -> None:
    async with short_of_blocks(48, max_preemptions=0) as rig:
        specs = [spec_of(i, drafter=None, plan=PLAIN, priority=i) for i in range(8)]
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert preemptions(rig.service) == 0


async def test_stop_tokens_and_the_least_length_hold_across_preemptions() -> None:
    async with short_of_blocks(36, preemption="recompute") as rig:
        await rig.attach(half_good_chain(rig.target))
        specs = [
            spec_of(i, stop_token_ids=(1, 5, 9), min_new_tokens=15 + i, max_new_tokens=40)
            for i in range(8)
        ]
        start_together(rig.service, len(specs))
        results = await rig.run_all(specs)
        assert [result.tokens for result in results] == [rig.reference(spec) for spec in specs]
        assert preemptions(rig.service) > 0


async def test_a_runner_that_refuses_a_session_ends_that_one_alone() -> None:
    async with verifier() as rig:
        runner: Any = rig.service.core.runner
        resume = runner.resume_session

        def refuse(session: Session) -> bool:
            if session.session_id == "bad":
                raise InvalidRequestError("no such penalty", reason="INVALID_SAMPLING")
            return bool(resume(session))

        runner.resume_session = refuse
        specs = [urgent("good"), urgent("bad")]
        good, bad = await rig.run_all(specs)
        assert good.tokens == rig.reference(specs[0])
        assert isinstance(bad.error, InvalidRequestError)
        assert bad.error.reason == "INVALID_SAMPLING"
        await rig.idle()


@pytest.mark.parametrize("way", ["swap", "recompute"])
async def test_metrics_and_info_tell_of_preemptions(way: str) -> None:
    async with one_at_a_time(preemption=way) as rig:
        read = rig.service.metrics.registry.get_sample_value
        running = asyncio.create_task(rig.run(make_spec(drafter=None, max_new_tokens=300)))
        await mid_stream(rig)
        release = hold(rig.service, lambda: preemptions(rig.service) == 1)
        other = asyncio.create_task(rig.run(urgent(max_new_tokens=100)))
        await until(lambda: session_of(rig).is_waiting)
        await until(lambda: read("outrider_verifier_sessions_running") == 1)
        assert read("outrider_verifier_sessions_waiting") == 1
        assert bool(read("outrider_verifier_swapped_bytes")) is (way == "swap")
        release()
        await asyncio.gather(running, other)
        for kind in ("swap", "recompute"):
            assert read("outrider_preemptions_total", {"kind": kind}) == int(kind == way)
        assert read("outrider_resumed_sessions_total", {"cause": "preemption"}) == 1
        info = await rig.service.info()
        assert (info.preemptions_swap, info.preemptions_recompute) == (
            int(way == "swap"),
            int(way == "recompute"),
        )


@pytest.mark.parametrize(
    "setting",
    [
        {"max_preemptions": -1},
        {"max_waiting": -1},
        {"kv_watermark": 1.0},
        {"priority_aging_s": 0.0},
        {"swap_space_gb": -0.5},
        {"preemption": "never"},
    ],
)
def test_settings_out_of_range_are_named(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        VerifierConfig(**setting)
