"""A runner that is a round ahead of the host, and drafts by itself: same texts, nothing leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from outrider_verifier.state.session import Session

from outrider.errors import InternalError, OutriderError, ResourceExhaustedError
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.wire.messages import FinishReason, SessionSpec
from tests.fakes.model_runner import FakeFlight, FakeRunner, Verify
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import ADDRESS, CHAIN, Rig, close, good_chain, make_spec, verifier
from tests.waiting import soon, until

OWN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3)
PLAIN = SpeculationPlan(method=DraftMethod.NONE, draft_tokens=0)


def own_spec(name: str = "s", **options: Any) -> SessionSpec:
    """A session that names no drafter."""
    return make_spec(name, **{"drafter": None, "plan": OWN, **options})


@asynccontextmanager
async def ahead(
    *, drafts: int = 3, slots: int = 64, blocks: int = 512, **settings: Any
) -> AsyncIterator[tuple[Rig, FakeRunner]]:
    """A verifier on a runner that runs ahead; at the end nothing may be held or in flight."""
    target = FakeTarget(num_blocks=blocks)
    runner = FakeRunner(target, drafts=drafts, slots=slots)
    async with verifier(target=target, runner=runner, features=False, **settings) as rig:
        yield rig, runner
        await rig.idle()
        await until(lambda: not runner.in_flight)
        assert runner.prefixes == {}
        assert runner.most_in_flight <= 2


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_the_texts_are_those_of_plain_decoding(drafts: int, temperature: float) -> None:
    async with ahead(drafts=drafts) as (rig, runner):
        specs = [
            own_spec(
                f"s{i}",
                prompt=tuple(range(1 + 4 * i)),
                max_new_tokens=1 + 9 * i,
                sampling=SamplingParams(temperature=temperature, seed=i),
            )
            for i in range(5)
        ]
        results = await rig.run_all(specs)
        for result, spec in zip(results, specs, strict=True):
            assert result.tokens == rig.reference(spec)
            assert result.last.finish_reason is FinishReason.LENGTH
        assert runner.rounds_ahead > 0


async def test_no_row_is_submitted_that_is_sure_to_be_dropped() -> None:
    async with ahead(drafts=0) as (rig, runner):
        await rig.run(own_spec(max_new_tokens=12))
        assert sum(len(flight.verify) for flight in runner.flights) == 11
        assert runner.rounds_ahead == 11


@pytest.mark.parametrize("index", range(1, 9))
async def test_a_stop_token_ends_the_text_although_the_next_round_is_under_way(index: int) -> None:
    async with ahead() as (rig, runner):
        text = rig.reference(own_spec())
        stop = text[index]
        long = own_spec("long", prompt=(8, 8), max_new_tokens=30)
        result, other = await rig.run_all([own_spec(stop_token_ids=(stop,)), long])
        assert result.tokens == text[: text.index(stop) + 1]
        assert result.last.finish_reason is FinishReason.STOP_TOKEN
        assert result.last.stats.emitted == len(result.tokens) - 1
        assert other.tokens == rig.reference(long)
        assert runner.rounds_ahead > 0


async def test_sessions_may_join_while_rounds_are_in_flight() -> None:
    async with ahead() as (rig, runner):
        specs = [own_spec(f"s{i}", prompt=(i, 2, 3), max_new_tokens=40) for i in range(6)]
        running: list[asyncio.Task[Any]] = []
        for number, spec in enumerate(specs):
            running.append(asyncio.create_task(rig.run(spec)))
            await until(lambda n=number: len(runner.flights) >= 3 * (n + 1))  # type: ignore[misc]
        for spec, task in zip(specs, running, strict=True):
            assert (await task).tokens == rig.reference(spec)
        assert runner.rounds_ahead > 0


async def test_sessions_that_leave_while_in_flight_leak_nothing() -> None:
    rng = random.Random(0)
    async with ahead() as (rig, runner):

        async def one(number: int) -> None:
            prompt = (1,) * rng.randint(1, 20)
            stream = rig.service.open_session(own_spec(f"s{number}", prompt=prompt))
            try:
                async with asyncio.timeout(rng.choice([0.0, 0.001, 5.0])):
                    for _ in range(rng.choice([0, 1, 2, 3])):
                        await anext(stream)
            except (TimeoutError, OutriderError):
                pass
            finally:
                await close(stream)

        for start in range(0, 300, 15):
            await asyncio.gather(*(one(start + i) for i in range(15)))
        assert runner.rounds_ahead > 0


async def test_closing_by_id_while_a_round_is_in_flight_drops_its_tokens() -> None:
    async with ahead() as (rig, runner):
        gate = threading.Event()
        runner.before_collect = lambda flight: None if len(runner.flights) < 6 else _wait(gate)
        running = asyncio.create_task(rig.run(own_spec(max_new_tokens=200)))
        await until(lambda: len(runner.in_flight) == 1 and len(runner.flights) >= 6)
        closing = asyncio.create_task(rig.service.close_session(SessionId("s")))
        await asyncio.sleep(0)
        gate.set()
        await closing
        result = await running
        assert result.last.finish_reason is FinishReason.CANCELLED
        text = rig.reference(own_spec(max_new_tokens=200))
        assert result.tokens == text[: len(result.tokens)]


@pytest.mark.parametrize(("lasts_s", "ahead_of_it"), [(30.0, False), (0.001, True)])
async def test_a_prompt_joins_the_round_behind_a_long_round_of_prompts(
    lasts_s: float, ahead_of_it: bool
) -> None:
    async with ahead(drafts=0) as (rig, runner):
        landed = threading.Event()
        runner.times, runner.lands = (lasts_s, lasts_s), landed.is_set
        runner.before_collect = lambda flight: _wait(landed)
        first = asyncio.create_task(rig.run(own_spec("a", prompt=(1,) * 6)))
        await until(lambda: len(runner.flights) >= (2 if ahead_of_it else 1))
        other = asyncio.create_task(rig.run(own_spec("b", prompt=(2,) * 6)))
        if not ahead_of_it:
            await until(lambda: len(runner.prefixes) == 2)
        landed.set()
        for task in (first, other):
            assert (await task).tokens
        joined = [row.session.session_id for row in runner.flights[1].prefill]
        assert ("b" in joined) is not ahead_of_it


async def test_a_newer_epoch_takes_over_while_a_round_is_in_flight() -> None:
    async with ahead() as (rig, runner):
        counters, lands = rig.service.core.counters, runner.lands
        # From then on the round lasts until the newer epoch is there.
        runner.lands = lambda: lands() and (runner.rounds_ahead <= 3 or counters["sessions"] == 2)
        old = asyncio.create_task(rig.run(own_spec(max_new_tokens=300)))
        await until(lambda: runner.rounds_ahead > 3)
        newer = await rig.run(own_spec(epoch=1, max_new_tokens=20))
        assert newer.tokens == rig.reference(own_spec(max_new_tokens=20))
        assert (await old).last.finish_reason is FinishReason.CANCELLED


async def test_an_error_in_submit_fails_the_sessions_of_that_round_only() -> None:
    async with ahead() as (rig, runner):

        def explode(verify: Verify) -> None:
            if len(runner.flights) == 6:
                raise RuntimeError("injected")

        runner.before_submit = explode
        spec = own_spec("bad", max_new_tokens=100)
        bad = await rig.run(spec)
        assert isinstance(bad.error, InternalError)
        # The round in flight came before the one that failed: its tokens count.
        emitted = [flight.outcome.decoded.all_rows()[0].tokens for flight in runner.flights[1:]]
        assert len(bad.tokens) == 1 + sum(map(len, emitted))
        assert bad.tokens == rig.reference(spec)[: len(bad.tokens)]
        runner.before_submit = None
        after = own_spec("after")
        assert (await rig.run(after)).tokens == rig.reference(after)
        assert rig.service.core.counters["failed_rounds"] == 1


async def test_an_error_in_collect_fails_the_sessions_of_that_round_only() -> None:
    async with ahead() as (rig, runner):

        def explode(flight: FakeFlight) -> None:
            if runner.flights.index(flight) == 4:
                raise RuntimeError("injected")

        runner.before_collect = explode
        short, bad = await rig.run_all(
            [own_spec("short", max_new_tokens=2), own_spec("bad", max_new_tokens=100)]
        )
        assert short.error is None
        assert isinstance(bad.error, InternalError)
        # The round after the failed one was under way; nobody hears of it.
        assert len(runner.flights) == 6
        after = own_spec("after")
        assert (await rig.run(after)).tokens == rig.reference(after)
        assert rig.service.core.counters["failed_rounds"] == 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1),
        SamplingParams(banned_ids=(3,)),
    ],
)
async def test_no_warper_keeps_rounds_from_running_ahead(sampling: SamplingParams) -> None:
    async with ahead() as (rig, runner):
        spec = own_spec(sampling=sampling)
        assert (await rig.run(spec)).tokens == rig.reference(spec)
        assert runner.rounds_ahead > 0


async def test_rounds_run_ahead_across_the_minimum_length() -> None:
    async with ahead() as (rig, runner):
        stop = rig.reference(own_spec())[2]
        spec = own_spec(stop_token_ids=(stop,), min_new_tokens=7, max_new_tokens=60)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        assert all(flight.verify[0].in_process_depth == 3 for flight in runner.flights[1:])
        assert runner.flights[2].ahead, "a round that stands before the minimum's end"


async def test_a_rounds_events_are_told_while_the_next_one_is_in_flight() -> None:
    async with ahead() as (rig, runner):
        ends = threading.Semaphore(3)

        def wait(flight: FakeFlight) -> None:
            assert ends.acquire(timeout=5)

        runner.before_collect = wait
        stream = rig.service.open_session(own_spec(max_new_tokens=40))
        for expected in (0, 1, 2):
            assert (await soon(anext(stream))).round_id == expected
        # Three rounds have ended; the fourth is waited for while the fifth is under way.
        await until(lambda: len(runner.flights) == 5)
        for _ in range(200):
            ends.release()
        await close(stream)


async def test_a_session_with_a_drafter_is_verified_as_ever() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        await rig.attach(good_chain(target))
        spec = make_spec(plan=CHAIN, max_new_tokens=31)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        assert (result.last.stats.rounds, result.last.stats.accepted) == (6, 24)
        assert runner.rounds_ahead == 0
        await rig.idle()


async def test_own_drafts_are_counted_and_reported_over_a_transport() -> None:
    async with ahead(simulated_acceptance="2.6") as (rig, runner):
        dialer = rig.network.dialer()
        control = await dialer.verifier(ADDRESS)
        info = await control.info()
        assert (info.in_process_methods, info.in_process_draft_length) == ((DraftMethod.EAGLE3,), 3)
        assert info.simulated_acceptance == "2.6"
        spec = own_spec(max_new_tokens=30)
        tokens: list[int] = []
        events = control.open_session(spec)
        assert hasattr(events, "aclose")
        async with aclosing(events) as stream:
            async for event in stream:
                tokens += event.tokens
                last = event
        assert tokens == rig.reference(spec)
        stats = last.stats
        settled = [flight for flight in runner.flights if flight.verify][: stats.rounds]
        assert stats.proposed == 3 * stats.rounds
        assert stats.fallback_rounds == 0
        assert stats.emitted == 29
        stood = sum(len(flight.outcome.decoded.all_rows()[0].tokens) - 1 for flight in settled)
        assert stood - 4 < stats.accepted <= stood
        assert rig.service.core.counters["proposed_tokens"] == stats.proposed
        assert last.drafter_attached is False
        await dialer.close()


async def test_a_plan_may_turn_own_drafts_off_and_on() -> None:
    async with ahead() as (rig, runner):
        runner.before_collect = lambda flight: _pause()
        spec = own_spec(max_new_tokens=300)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: len(runner.flights) > 5)
        await rig.service.set_plan(SessionId("s"), PLAIN)
        off = len(runner.flights)
        await until(lambda: len(runner.flights) > off + 5)
        assert all(
            flight.verify[0].in_process_depth == 0 for flight in runner.flights[off + 2 : off + 5]
        )
        await rig.service.set_plan(SessionId("s"), OWN)
        result = await running
        assert runner.flights[-2].verify[0].in_process_depth == 3
        assert result.tokens == rig.reference(spec)
        # Plain rounds of a plain plan are no fallback.
        assert result.last.stats.fallback_rounds == 0


async def test_a_session_without_a_slot_is_refused_and_holds_nothing() -> None:
    async with ahead(slots=1) as (rig, runner):
        # The first has its slot until the second was refused one.
        tried = threading.Event()
        runner.before_collect = lambda flight: _wait_for(tried)
        first = asyncio.create_task(rig.run(own_spec("first", max_new_tokens=60)))
        await until(lambda: len(runner.prefixes) == 1)
        refused = await rig.run(own_spec("second"))
        tried.set()
        assert isinstance(refused.error, ResourceExhaustedError)
        assert (await first).error is None


async def test_stopping_waits_for_what_is_in_flight() -> None:
    async with ahead() as (rig, runner):
        runner.before_collect = lambda flight: _pause()
        running = asyncio.create_task(rig.run(own_spec(max_new_tokens=400)))
        await until(lambda: runner.rounds_ahead > 2)
        await rig.service.stop()
        assert isinstance((await running).error, OutriderError)
        assert not runner.in_flight


def _wait_for(event: threading.Event) -> None:
    event.wait(0.1)


def _wait(gate: threading.Event) -> None:
    assert gate.wait(5)


def _pause() -> None:
    threading.Event().wait(0.002)


@pytest.mark.parametrize(("blocks", "least", "most"), [(256, 4, 6), (84, 20, 80)])
async def test_several_blocks_are_taken_at_a_time_where_there_are_plenty(
    blocks: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ahead(blocks=blocks) as (rig, runner):
        grow, grown = runner.record_new_blocks, 0

        def counted(session: Session) -> None:
            nonlocal grown
            grown += 1
            grow(session)

        monkeypatch.setattr(runner, "record_new_blocks", counted)
        spec = own_spec(max_new_tokens=300)
        result = await rig.run(spec)
        assert result.error is None and result.tokens == rig.reference(spec)
        assert least <= grown <= most


async def test_blocks_for_a_round_of_drafts_are_held_before_the_drafts_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = FakeTarget(num_blocks=256)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        await rig.attach(good_chain(target))
        block_manager, grow, grown = (
            rig.service.core.block_manager,
            runner.record_new_blocks,
            Counter[str](),
        )
        ready = block_manager.prepare_round
        planning = False

        def watched(session: Session) -> None:
            grown["late" if planning and session.emitted > 1 else "in time"] += 1
            grow(session)

        def plans(*given: Any, **named: Any) -> bool:
            nonlocal planning
            planning = True
            try:
                return ready(*given, **named)
            finally:
                planning = False

        monkeypatch.setattr(runner, "record_new_blocks", watched)
        monkeypatch.setattr(block_manager, "prepare_round", plans)
        await rig.run(make_spec(max_new_tokens=300))
        assert grown["in time"] > 3 and not grown["late"]
