"""The benchmark of the host's share of a round goes through every step of both processes."""

from __future__ import annotations

import asyncio
from contextlib import closing
from itertools import groupby
from typing import Any

import pytest
import torch
from outrider_bench import host_ahead, host_churn, host_plain, host_served
from outrider_bench.host import DrafterSide, measure
from outrider_bench.host_canned import BESIDE, Steps
from outrider_bench.host_own import OwnSide
from outrider_bench.host_verifier import VerifierSide

from outrider.spec.plan import DraftMethod, Plan
from outrider.transport.lane import lane_pair


def test_every_step_is_timed_in_every_round() -> None:
    steps = measure(2, 4)
    assert {len(taken) for taken in steps.taken.values()} == {4}
    assert all(steps.lowest(name) > 0.0 for name in steps.taken)
    critical = [name for name in steps.taken if BESIDE not in name]
    assert sum(name.startswith("verifier: ") for name in critical) == 9
    assert sum(name.startswith("drafter: ") for name in critical) == 6


def test_features_of_a_round_are_copied_while_the_device_is_at_the_next_one() -> None:
    order = list[str]()
    ours, theirs = lane_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(3, Steps(), planner="fixed", lane=ours)
        drafter = DrafterSide(3, Steps(), verifier.head)
        verifier.open(3, 64, Plan(method=DraftMethod.EAGLE3, draft_tokens=4, patience_ms=60_000))
        verifier.offer(drafter.follow(theirs))
        store = verifier.service._core.store
        assert store is not None
        engine = verifier.service._rounds._engine
        for owner, name in ((engine, "submit"), (engine, "collect"), (store, "append")):
            _note(owner, name, order)
        verifier.round()
        kept = store.used_bytes
        verifier.offer(drafter.follow(theirs))
        assert store.used_bytes == kept and "append" not in order
        verifier.round()
    assert store.used_bytes > kept
    assert [name for name, _ in groupby(order)] == [
        "submit",
        "collect",
        "submit",
        "append",
        "collect",
    ]


def _note(owner: Any, method: str, order: list[str]) -> None:
    """Have calls of a method be written down."""
    function = getattr(owner, method)

    def noted(*given: Any, **named: Any) -> Any:
        order.append(method)
        return function(*given, **named)

    setattr(owner, method, noted)


def test_with_look_ahead_every_round_is_a_hit_and_drafts_are_taken_in_beside() -> None:
    steps = host_ahead.measure(2, 4, offered=8, pause_s=0.0)
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
    found = host_plain.measure(2, 3)
    assert set(found) == set(host_plain.WAYS)
    for steps in found.values():
        assert {len(taken) for taken in steps.taken.values()} == {3}
        assert "verifier: planner" in steps.taken


def test_drafters_hear_of_no_session_that_comes_and_goes_while_its_kind_is_paused() -> None:
    side = host_churn.ChurningSide(4, 20, host_plain.WAYS["head, paused"])
    with torch.inference_mode():
        for _ in range(40):
            side.replacing_round()
    assert side.opened > 5 and side.told == 0
    assert {"verifier: opened", "verifier: planner", "verifier: drafters told"} < set(
        side.steps.taken
    )


def test_rounds_with_own_drafts_run_ahead_and_every_step_of_them_is_timed() -> None:
    with torch.inference_mode():
        side = OwnSide(3, 4, 3)
        before = side.service._core.counters["emitted_tokens"]
        for _ in range(4):
            side.round()
    assert side._rounds.flying
    # The canned device lets all three drafted tokens stand.
    assert side.service._core.counters["emitted_tokens"] - before == 4 * 3 * 4
    assert {len(taken) for taken in side.steps.taken.values()} == {4}
    assert {"verifier: planned", "verifier: committed", "verifier: rest"} < set(side.steps.taken)


@pytest.mark.parametrize("answers", [0, 8])
def test_a_whole_verifier_serves_rounds_to_routers(
    answers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(host_served.serve(4, 2, 3, 0.5, answers=answers, lanes=True, warm_s=0.1))
    header, _, row = capsys.readouterr().out.strip().splitlines()
    found = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert (found["routers"], found["lanes"]) == ("2", "True")
    assert int(found["rounds/s"]) > 0 and int(found["engine us"]) > 0
    if answers:
        # Four tokens a round: an answer of 8 has a prompt's round and two more about.
        assert float(found["ended a round"]) > 0.5
