"""A device that stops working: every session fails, every call is refused, the process ends."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from outrider.engine.device.current_device import is_device_usable
from outrider.errors import InternalError, UnavailableError
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.wire.messages import SessionSpec
from tests.fakes.model_runner import FakeFlight, FakeRunner, Verify
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import (
    ADDRESS,
    LONG,
    Result,
    Rig,
    good_chain,
    make_spec,
    verifier,
)
from tests.waiting import PATIENCE_S, soon, until

OWN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=3)
LOST = "DEVICE_LOST"


def own_spec(name: str, *, max_new_tokens: int = 400) -> SessionSpec:
    return make_spec(name, drafter=None, plan=OWN, max_new_tokens=max_new_tokens)


@asynccontextmanager
async def on_a_device(*, drafts: int = 3) -> AsyncIterator[tuple[Rig, FakeRunner]]:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target, drafts=drafts)
    async with verifier(target=target, runner=runner, features=False) as rig:
        yield rig, runner


def break_in_collect(runner: FakeRunner, number: int, *, decoding: int = 0) -> None:
    """The device is lost in the first round from this number on in which so many decode."""

    def fail(flight: FakeFlight) -> None:
        ready = len(flight.verify) >= decoding and runner.flights.index(flight) >= number
        if ready or not runner.is_usable:
            runner.is_usable = False
            raise RuntimeError("an illegal memory access was encountered")

    runner.before_collect = fail


def reasons(results: list[Result]) -> set[str]:
    assert all(isinstance(result.error, UnavailableError) for result in results)
    return {result.error.reason for result in results if result.error is not None}


@pytest.mark.parametrize("drafts", [0, 3])
async def test_a_failing_collect_on_a_lost_device_fails_every_session(
    drafts: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with on_a_device(drafts=drafts) as (rig, runner):
        break_in_collect(runner, 6, decoding=3)
        specs = [own_spec(f"s{i}") for i in range(3)]
        results = await rig.run_all(specs)
        assert reasons(results) == {LOST}
        for result, spec in zip(results, specs, strict=True):
            # What was settled before counts, nothing else was told.
            assert result.tokens
            assert result.tokens == rig.reference(spec)[: len(result.tokens)]
        async with asyncio.timeout(PATIENCE_S):
            await rig.service.lost.wait()
        # A round may have been under way behind the failed one; none follows.
        rounds = next(i for i, f in enumerate(runner.flights) if i >= 6 and len(f.verify) == 3)
        assert len(runner.flights) <= rounds + 2
        assert rig.service.core.counters["device_losses"] == 1
        assert rig.service.core.counters["failed_rounds"] == 1
        critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
        assert len(critical) == 1
        await rig.idle()


async def test_sessions_outside_the_failed_round_fail_as_well() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        drafter = await rig.attach(lambda followed: None)
        waiting = asyncio.create_task(rig.run(make_spec("waits", plan=LONG)))
        await until(lambda: any(f.verdicts for f in drafter.sessions.values()))

        def fail(verify: Verify) -> None:
            assert all(row.session.session_id != "waits" for row in verify)
            runner.is_usable = False
            raise RuntimeError("launch failed")

        runner.before_submit = fail
        bad = await rig.run(own_spec("bad"))
        assert reasons([bad]) == {LOST}
        assert reasons([await soon(waiting)]) == {LOST}


async def test_afterwards_every_call_is_refused() -> None:
    async with on_a_device() as (rig, runner):
        control = await rig.network.dialer().verifier(ADDRESS)
        assert (await control.info()).sessions == 0
        break_in_collect(runner, 3)
        await rig.run(own_spec("s"))
        await rig.service.lost.wait()
        service, calls = rig.service, len(runner.flights)
        assert reasons([await rig.run(own_spec("new"))]) == {LOST}
        for call in (
            service.set_plan(SessionId("s"), OWN),
            service.close_session(SessionId("s")),
            service.info(),
            control.info(),
        ):
            with pytest.raises(UnavailableError) as refused:
                await call
            assert refused.value.reason == LOST
        connection = await rig.network.dialer().exchange(ADDRESS)
        with pytest.raises(UnavailableError):
            await soon(connection.receive())
        await connection.close()
        assert len(runner.flights) == calls


async def test_calls_that_wait_when_the_device_is_lost_are_answered() -> None:
    async with on_a_device() as (rig, runner):
        gate, held = threading.Event(), threading.Event()

        def fail(flight: FakeFlight) -> None:
            if len(runner.flights) > 4:
                held.set()
                assert gate.wait(5)
                runner.is_usable = False
                raise RuntimeError("launch failed")

        runner.before_collect = fail
        running = asyncio.create_task(rig.run(own_spec("s")))
        await asyncio.to_thread(held.wait, 5)
        waiting = [asyncio.create_task(rig.run(own_spec(f"w{i}"))) for i in range(3)]
        changing = asyncio.create_task(rig.service.set_plan(SessionId("s"), OWN))
        await until(lambda: rig.service.backlog == 4)
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            assert reasons([await running, *(await asyncio.gather(*waiting))]) == {LOST}
            with pytest.raises(UnavailableError):
                await changing


async def test_a_device_lost_between_rounds_is_noticed_by_the_next_session() -> None:
    async with on_a_device() as (rig, runner):
        first = await rig.run(own_spec("first", max_new_tokens=9))
        assert first.error is None
        runner.is_usable = False
        assert reasons([await rig.run(own_spec("next"))]) == {LOST}
        await soon(rig.service.lost.wait())
        assert rig.service.core.counters["failed_rounds"] == 0
        await rig.idle()


async def test_a_working_device_loses_the_sessions_of_the_round_only() -> None:
    async with on_a_device() as (rig, runner):
        failed: list[FakeFlight] = []

        def fail(flight: FakeFlight) -> None:
            if not failed and len(runner.flights) > 4:
                failed.append(flight)
                raise RuntimeError("injected")

        runner.before_collect = fail
        bad = await rig.run(own_spec("bad"))
        assert isinstance(bad.error, InternalError)
        assert bad.error.reason == "ROUND_FAILED"
        spec = own_spec("good", max_new_tokens=20)
        assert (await rig.run(spec)).tokens == rig.reference(spec)
        assert not rig.service.lost.is_set()
        assert rig.service.core.counters["device_losses"] == 0


async def test_a_drafters_session_fails_and_is_withdrawn() -> None:
    target = FakeTarget(num_blocks=512)
    runner = FakeRunner(target)
    async with verifier(target=target, runner=runner) as rig:
        drafter = await rig.attach(good_chain(target))
        break_in_collect(runner, 5)
        assert reasons([await rig.run(make_spec(max_new_tokens=200))]) == {LOST}
        await rig.service.lost.wait()
        await until(lambda: not drafter.sessions)


async def test_stopping_a_lost_verifier_is_quick() -> None:
    async with on_a_device() as (rig, runner):
        break_in_collect(runner, 3)
        await rig.run(own_spec("s"))
        await rig.service.lost.wait()
        async with asyncio.timeout(PATIENCE_S):
            assert await rig.service.drain(5.0)
            await rig.service.stop()


def test_a_cpu_always_works() -> None:
    assert is_device_usable(torch.device("cpu"))


def test_a_failing_synchronisation_means_that_the_device_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert not is_device_usable(torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert is_device_usable(torch.device("cuda:0"))
