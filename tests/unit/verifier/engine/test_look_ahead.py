"""Drafts for outcomes that had not happened: taken when they do, without a word of the drafter."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from outrider_verifier.state.session_phase import ENDED

from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import DraftTree
from outrider.wire.messages import Proposal, Proposals
from tests.fakes.model_runner import FakeRunner, Verify
from tests.fakes.scripted_drafter import Followed, PredictFn, ScriptedDrafter, make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import Rig, good_chain, make_spec, mid_stream, truth, verifier
from tests.waiting import until

DEPTH = 4
AHEAD = SpeculationPlan(
    method=DraftMethod.EAGLE3,
    draft_tokens=DEPTH,
    look_ahead=1,
    fan_out=8,
    proposal_timeout_ms=30_000,
)


def foresee(target: FakeTarget, wrong: int = 3) -> PredictFn:
    """The outcome that comes of a right chain, a few rounds on end, among others that do not."""

    def predict(followed: Followed) -> Sequence[tuple[Sequence[int], DraftTree]]:
        text = truth(target, followed, 3 * DEPTH)
        right = [(text[: DEPTH + 1], make_tree(text[DEPTH + 1 : 2 * DEPTH + 1]))]
        others = [
            ([*text[:stop], (text[stop] + 1 + stop) % target.vocab_size], make_tree([1, 2]))
            for stop in range(wrong)
        ]
        return [*others[:1], *right, *others[1:]]

    return predict


def sometimes(predict: PredictFn, share: float, seed: int = 0) -> PredictFn:
    """Foresees only some outcomes."""
    rng = random.Random(seed)
    return lambda followed: [each for each in predict(followed) if rng.random() < share]


@asynccontextmanager
async def looking_ahead(**settings: Any) -> AsyncIterator[tuple[Rig, FakeRunner]]:
    """A verifier on a runner that runs ahead, whose rounds take until nothing is on its way."""
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target, drafts=0)
    async with verifier(target=target, runner=runner, **settings) as rig:
        looks, begun = 0, 0

        def lands() -> bool:
            nonlocal looks, begun
            if begun != len(runner.flights):
                looks, begun = 0, len(runner.flights)
            looks += 1
            return looks > 40

        runner.lands = lands
        # Whether it pays is for tests of the planner.
        rig.service.core.policy.should_look_ahead = lambda session: True  # type: ignore[method-assign]
        yield rig, runner
        await rig.idle()
        await until(lambda: not runner.in_flight)


async def test_a_hit_is_verified_without_a_word_of_the_drafter() -> None:
    async with looking_ahead() as (rig, runner):
        drafter = await rig.attach(good_chain(rig.target))
        silent: list[bool] = []
        text: list[int] = []

        def submitted(verify: Verify) -> None:
            silent.extend(drafter.muted for row in verify if row.held is not None)

        def fresh_and_ahead(followed: Followed) -> DraftTree:
            # The first answer is the last: all that follows comes of what was sent ahead.
            text.extend(truth(rig.target, followed, 3 * DEPTH + 3))
            return make_tree(text[:DEPTH])

        drafter.propose = fresh_and_ahead
        drafter.predict = lambda followed: [
            (text[: n * (DEPTH + 1)], make_tree(text[n * (DEPTH + 1) :][:DEPTH])) for n in (1, 2)
        ]
        runner.before_submit = submitted
        runner.lands = lambda: drafter.muted
        mute = asyncio.create_task(_mute_once(rig, drafter))
        spec = make_spec(max_new_tokens=3 * DEPTH + 5, plan=replace(AHEAD, proposal_timeout_ms=100))
        result = await rig.run(spec)
        await mute
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.hit_rounds == 2
        assert result.last.stats.hit_accepted == 2 * DEPTH
        assert silent[1:3] == [True, True]


async def _mute_once(rig: Rig, drafter: ScriptedDrafter) -> None:
    """From the moment that the drafts ahead are there the drafter says nothing."""
    core = rig.service.core
    await until(lambda: core.counters["proposals_stored"] == 3 and core.num_proposals == 2)
    drafter.muted = True


@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("planner", ["fixed", "automatic"])
async def test_texts_are_the_same_with_hits_and_misses(share: float, planner: str) -> None:
    async with looking_ahead(planner=planner) as (rig, runner):
        policy = rig.service.core.policy
        policy.should_pause = lambda session: False  # type: ignore[method-assign]
        # On a CPU it would begin in lock-step.
        policy.should_look_ahead = lambda session: True  # type: ignore[method-assign]
        predict = sometimes(foresee(rig.target), share)
        drafter = await rig.attach(good_chain(rig.target), predict=predict)
        specs = [
            make_spec(
                f"s{i}",
                prompt=(i, 2, 3),
                max_new_tokens=40 + 7 * i,
                plan=AHEAD,
                sampling=SamplingParams(temperature=0.8 * (i % 2), seed=i),
            )
            for i in range(5)
        ]
        results = await rig.run_all(specs)
        for spec, result in zip(specs, results, strict=True):
            assert result.tokens == rig.reference(spec)
        assert runner.most_in_flight <= 2
        stats = [result.last.stats for result in results]
        assert drafter.foreseen > 0
        assert sum(s.hit_rounds for s in stats) > 0
        for s in stats:
            missed = s.look_ahead_rounds - s.hit_rounds - s.fresh_rounds
            assert missed == s.fallback_rounds
            assert s.hit_accepted + s.fresh_accepted == s.accepted
        counters = rig.service.core.counters
        for name in ("look_ahead_rounds", "hit_rounds", "fresh_rounds"):
            assert counters[name] == sum(getattr(s, name) for s in stats)
        assert counters["hit_accepted_tokens"] == sum(s.hit_accepted for s in stats)
        assert counters["fresh_accepted_tokens"] == sum(s.fresh_accepted for s in stats)


async def test_a_round_of_hits_is_submitted_before_anything_is_booked() -> None:
    async with looking_ahead() as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        unbooked: list[bool] = []

        def submitted(verify: Verify) -> None:
            for row in verify:
                if row.held is not None and row.held.is_hit:
                    # Prompt, first round, and one more for each that was booked.
                    rounds = sum(bool(flight.verify) for flight in runner.flights)
                    unbooked.append(row.session.round_id < rounds)

        runner.before_submit = submitted
        spec = make_spec(max_new_tokens=80, plan=AHEAD)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        # The draft of the last round is longer than what may still be emitted.
        assert len(unbooked) > 5 and all(unbooked[:-2])


async def test_the_next_round_is_under_way_before_the_drafter_hears_of_a_hit() -> None:
    async with looking_ahead() as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        told_in_flight: list[int] = []
        outbox: Any = rig.service.outbox
        flush = outbox.flush

        def flushed() -> bool:
            told_in_flight.append(len(runner.in_flight))
            return flush()

        outbox.flush = flushed
        reports: list[float] = []
        observe = rig.service.metrics.observe_report

        def observed(report: Any) -> None:
            if report.hit_idle_s is not None:
                reports.append(report.hit_idle_s)
            observe(report)

        rig.service.metrics.observe_report = observed  # type: ignore[method-assign]
        result = await rig.run(make_spec(max_new_tokens=80, plan=AHEAD))
        assert result.last.stats.hit_rounds > 5
        # Whatever is said of a round is said while the next one runs, where that is of hits.
        assert sum(told_in_flight) >= result.last.stats.hit_rounds
        assert len(reports) == result.last.stats.hit_rounds
        assert all(0.0 <= idle_s < 1.0 for idle_s in reports)


async def test_a_session_that_ends_with_a_hit_leaves_the_others_going() -> None:
    async with looking_ahead() as (rig, _):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        stop = rig.reference(make_spec(max_new_tokens=60))[23]
        specs = [
            make_spec("long", max_new_tokens=90, plan=AHEAD),
            make_spec("stops", max_new_tokens=60, plan=AHEAD, stop_token_ids=(stop,)),
            make_spec("short", prompt=(7, 7), max_new_tokens=13, plan=AHEAD),
            make_spec("plain", prompt=(9,), max_new_tokens=40, drafter=None),
        ]
        for spec, result in zip(specs, await rig.run_all(specs), strict=True):
            assert result.tokens == rig.reference(spec)
            assert result.error is None


async def test_branches_that_a_verdict_contradicts_are_dropped() -> None:
    async with looking_ahead() as (rig, _):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target, wrong=4))
        core = rig.service.core
        most = 0
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=120, plan=AHEAD)))
        while not running.done():
            most = max(most, core.num_proposals)
            await asyncio.sleep(0)
        assert running.result().last.stats.hit_rounds > 5
        # Those of two rounds: some are for longer prefixes than the one that came about.
        assert 0 < most <= 2 * 5 + 1


async def test_an_error_in_a_round_of_hits_fails_its_sessions_once() -> None:
    async with looking_ahead() as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))

        def explode(verify: Verify) -> None:
            if any(row.held is not None and row.held.is_hit for row in verify):
                raise RuntimeError("injected")

        runner.before_submit = explode
        spec = make_spec(max_new_tokens=60, plan=AHEAD)
        bad = await rig.run(spec)
        assert bad.error is not None and "injected" in str(bad.error)
        # What was emitted before counts.
        assert bad.tokens == rig.reference(spec)[: len(bad.tokens)] and len(bad.tokens) > DEPTH
        assert rig.service.core.counters["failed_rounds"] == 1
        runner.before_submit = None
        after = make_spec("after", plan=AHEAD)
        assert (await rig.run(after)).tokens == rig.reference(after)


async def test_sessions_may_come_and_go_while_rounds_follow_one_another_by_hits() -> None:
    async with looking_ahead(planner="automatic") as (rig, _):
        await rig.attach(good_chain(rig.target), predict=sometimes(foresee(rig.target), 0.8))

        async def one(number: int) -> None:
            spec = make_spec(
                f"s{number}", prompt=(number % 20, 3), max_new_tokens=20 + number, plan=AHEAD
            )
            if number % 3 == 0:
                stream = rig.service.open_session(spec)
                async for event in stream:
                    if event.round_id > 2:
                        break
                await stream.aclose()
                return
            assert (await rig.run(spec)).tokens == rig.reference(spec)

        for start in range(0, 24, 6):
            await asyncio.gather(*(one(start + i) for i in range(6)))


async def test_what_takes_the_place_of_a_session_hears_nothing_of_its_round() -> None:
    async with looking_ahead(max_sessions=1) as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        lands = runner.lands
        holds, held = False, threading.Event()

        def lands_late() -> bool:
            if holds:
                held.set()
                # Both commands are there when the next one is taken.
                while holds and rig.service.backlog < 2:
                    time.sleep(0.001)
            return lands()

        runner.lands = lands_late
        first = rig.service.open_session(make_spec("first", max_new_tokens=400, plan=AHEAD))
        async for event in first:
            if event.round_id > 2:
                break
        holds = True
        await until(held.is_set)
        closing = asyncio.create_task(first.aclose())
        spec = make_spec("second", prompt=(9, 8, 7), max_new_tokens=40, plan=AHEAD)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: SessionId("second") in rig.service.core.sessions)
        holds = False
        await closing
        async with asyncio.timeout(10.0):
            result = await running
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.proposed > 0
        assert rig.service.core.counters["sessions_lost_by_drafters"] == 0


async def test_a_change_of_mind_is_not_put_off_by_hits() -> None:
    async with looking_ahead(planner="automatic") as (rig, _):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        policy = rig.service.core.policy
        pauses = False
        policy.should_pause = lambda session: pauses  # type: ignore[method-assign]
        policy.should_look_ahead = lambda session: True  # type: ignore[method-assign]
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=400, plan=AHEAD)))
        await mid_stream(rig)
        session = rig.service.core.sessions[SessionId("s")]
        await until(lambda: rig.service.core.counters["hit_rounds"] > 3)
        pauses = policy.changed = True
        await until(lambda: session.is_speculation_off)
        pauses, policy.changed = False, True
        await until(lambda: not session.is_speculation_off or session.phase is ENDED)
        result = await running
        assert result.tokens == rig.reference(make_spec(max_new_tokens=400))


async def test_late_drafts_are_told_from_drafts_that_nobody_waited_for() -> None:
    async with verifier() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        drafter.muted = True
        arrived: list[tuple[int, bool]] = []
        policy = rig.service.core.policy
        inner = policy.record_arrival

        def noted(session: Any, *, prefix_len: int, usable: bool, now: float) -> None:
            arrived.append((prefix_len, usable))
            inner(session, prefix_len=prefix_len, usable=usable, now=now)

        policy.record_arrival = noted  # type: ignore[method-assign]
        rig.target.forward_s = 0.01
        spec = make_spec(max_new_tokens=100, plan=replace(AHEAD, proposal_timeout_ms=20))
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: rig.service.core.counters["proposal_timeouts"] == 1)
        (followed,) = drafter.sessions.values()
        first = followed.verdicts[0]
        await until(lambda: len(followed.verdicts) > 3)
        missed = Proposal(
            handle=0,
            prefix_digest=first.prefix_digest,
            prefix_len=len(first.tokens),
            tree=make_tree([1]),
        )
        beside = [replace(missed, prefix_digest=n) for n in range(20)]
        ahead = [
            replace(missed, prefix_digest=n, prefix_len=len(followed.tokens) + 12) for n in (1, 2)
        ]
        assert drafter.connection is not None
        await drafter.connection.send(Proposals.of_proposals(ahead))
        await until(lambda: rig.service.core.num_proposals == 2)
        assert arrived == []
        await drafter.connection.send(Proposals.of_proposals([*beside[:10], missed, *beside[10:]]))
        await until(lambda: bool(arrived))
        assert arrived == [(len(first.tokens), False)]
        await drafter.connection.send(Proposals.of_proposals(beside))
        await until(lambda: len(arrived) == 2)
        assert arrived[1] == (0, False)
        assert (await running).tokens == rig.reference(spec)


async def test_where_rounds_run_at_submission_what_came_meanwhile_counts_as_hits() -> None:
    target = FakeTarget(num_blocks=512)
    async with verifier(target=target) as rig:
        target.forward_s = 0.02
        await rig.attach(good_chain(target), predict=foresee(target))
        specs = [make_spec(f"s{i}", prompt=(i, 5), max_new_tokens=60, plan=AHEAD) for i in range(3)]
        for spec, result in zip(specs, await rig.run_all(specs), strict=True):
            assert result.tokens == rig.reference(spec)
            assert result.last.stats.hit_rounds > result.last.stats.look_ahead_rounds // 2


async def test_a_hit_shows_that_its_drafter_is_well() -> None:
    async with looking_ahead() as (rig, runner):
        await rig.attach(good_chain(rig.target), predict=foresee(rig.target))
        suspects: list[bool] = []

        def submitted(verify: Verify) -> None:
            for row in verify:
                if row.held is not None and row.held.is_hit:
                    suspects.append(row.session.has_stalled_drafter)
                row.session.has_stalled_drafter = True

        runner.before_submit = submitted
        result = await rig.run(make_spec(max_new_tokens=40, plan=AHEAD))
        assert suspects and not any(suspects)
        assert len(suspects) == result.last.stats.hit_rounds
