"""The benchmark of the host's share of a round goes through every step of both processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from typing import Any

import pytest
import torch
from outrider_bench.host import look_ahead, plain, router_rounds, session_churn
from outrider_bench.host.cli import DrafterSide, measure
from outrider_bench.host.fake_device import BESIDE, Steps
from outrider_bench.host.in_process import InProcessSide
from outrider_bench.host.scripted_verifier import VerifierSide

from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.shm import make_channel_pair


def test_every_step_is_timed_in_every_round() -> None:
    steps = measure(2, 4)
    assert {len(taken) for taken in steps.taken.values()} == {4}
    assert all(steps.lowest(name) > 0.0 for name in steps.taken)
    critical = [name for name in steps.taken if BESIDE not in name]
    assert sum(name.startswith("verifier: ") for name in critical) == 9
    assert sum(name.startswith("drafter: ") for name in critical) == 6


def test_sessions_that_end_make_way_for_others() -> None:
    steps = measure(4, 24, answers=32)
    replaced = "verifier: ended and opened" + BESIDE
    assert len(steps.taken[replaced]) == 12, "four sessions, of eight rounds each"
    decoded = "drafter: verdicts decoded"
    assert len(steps.taken[decoded]) == 24
    assert 0.0 < steps.mean(replaced) < max(steps.taken[replaced])


CHAIN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=60_000)


@contextmanager
def lock_step(sessions: int) -> Iterator[tuple[VerifierSide, Callable[[], None]]]:
    """A verifier whose sessions have drafts, and what lets a drafter follow it and answer."""
    ours, theirs = make_channel_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(sessions + 2, Steps(), planner="fixed", shm_channel=ours)
        drafter = DrafterSide(sessions + 2, Steps(), verifier.head)
        verifier.open(sessions, 64, CHAIN)

        def draft() -> None:
            verifier.offer(drafter.follow(theirs))

        draft()
        yield verifier, draft


def test_features_of_a_round_are_copied_while_the_device_is_at_the_next_one() -> None:
    order = list[str]()
    with lock_step(3) as (verifier, draft):
        core, engine = verifier.service.core, verifier.service.core.runner
        assert core.store is not None
        for owner, name in (
            (engine, "submit_round"),
            (engine, "collect_round"),
            (core.store, "append"),
        ):
            _note(owner, name, order)
        verifier.round()
        kept = core.store.used_bytes
        draft()
        assert core.store.used_bytes == kept and "append" not in order
        verifier.round()
        assert core.store.used_bytes > kept
    calls = [name for name, _ in groupby(order)]
    assert calls == ["submit_round", "collect_round", "submit_round", "append", "collect_round"]


def test_who_begins_meanwhile_finds_the_prompts_of_the_round_before() -> None:
    with lock_step(2) as (verifier, draft):
        core = verifier.service.core
        verifier.open_one(2, 200, 8, CHAIN, drafted=True)
        while not core.sessions[SessionId("s2")].is_prefilled:
            verifier.round()
            draft()
        # No features are kept of it, so nobody asks the store for its sake.
        verifier.open_one(3, 200, 8, SpeculationPlan(), drafted=False)
        verifier.service.rounds.plan_round(0.0)
        assert core.sessions[SessionId("s3")].prefill_left < 16


def test_a_round_that_cannot_be_kept_ends_its_sessions_and_nobody_in_the_middle_of_a_look() -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room")

    with lock_step(3) as (verifier, _):
        core = verifier.service.core
        verifier.round()
        assert core.store is not None
        setattr(core.store, "append", fails)  # noqa: B010
        for session in core.sessions.values():
            assert core.store.is_complete(session.handle)
        assert len(core.sessions) == 3
        assert verifier.service.rounds.plan_round(0.0).is_empty
        assert not core.sessions and core.counters["failed_rounds"] == 1


def _note(owner: Any, method: str, order: list[str]) -> None:
    """Have calls of a method be written down."""
    function = getattr(owner, method)

    def noted(*given: Any, **named: Any) -> Any:
        order.append(method)
        return function(*given, **named)

    setattr(owner, method, noted)


def test_with_look_ahead_every_round_is_a_hit_and_drafts_are_taken_in_beside() -> None:
    steps = look_ahead.measure(2, 4, offered=8, pause_s=0.0)
    assert {len(taken) for taken in steps.taken.values()} == {4}
    critical = {name for name in steps.taken if BESIDE not in name}
    assert critical == {
        f"verifier: {step}"
        for step in (
            "sheet",
            "outcome settled",
            "drafts found",
            "rows staged",
        )
    }
    assert "verifier: proposals offered" + BESIDE in steps.taken


def test_plain_rounds_are_timed_whatever_their_sessions_did_without() -> None:
    found = plain.measure(2, 3)
    assert set(found) == set(plain.WAYS)
    for steps in found.values():
        assert {len(taken) for taken in steps.taken.values()} == {3}
        assert "verifier: planner" in steps.taken


def test_drafters_hear_of_no_session_that_comes_and_goes_while_its_kind_is_paused() -> None:
    side = session_churn.ChurningSide(4, 20, "head, paused")
    with torch.inference_mode():
        for _ in range(40):
            side.replacing_round()
    assert side.opened > 5 and side.told == 0
    assert {"verifier: opened", "verifier: planner", "verifier: drafters told"} < set(
        side.steps.taken
    )


def test_rounds_with_own_drafts_run_ahead_and_every_step_of_them_is_timed() -> None:
    with torch.inference_mode():
        side = InProcessSide(3, 4, 3)
        before = side.service.core.counters["emitted_tokens"]
        for _ in range(4):
            side.round()
    assert side.service.rounds.has_round_in_flight
    # The canned device lets all three drafted tokens stand.
    assert side.service.core.counters["emitted_tokens"] - before == 4 * 3 * 4
    assert {len(taken) for taken in side.steps.taken.values()} == {4}
    assert {"verifier: planned", "verifier: committed", "verifier: rest"} < set(side.steps.taken)


@pytest.mark.parametrize("answers", [0, 8])
def test_a_whole_verifier_serves_rounds_to_routers(
    answers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(
        router_rounds.measure_rounds(4, 2, 3, 0.5, answers=answers, shm_channels=True, warm_s=0.1)
    )
    header, _, row = capsys.readouterr().out.strip().splitlines()
    found = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert (found["routers"], found["shared memory"]) == ("2", "True")
    assert int(found["rounds/s"]) > 0 and int(found["engine us"]) > 0
    if answers:
        # Four tokens a round: an answer of 8 has a prompt's round and two more about.
        assert float(found["ended a round"]) > 0.5
