"""Rounds of sessions that all have drafts are planned without weighing anything, prompts or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from outrider_bench.host.cli import DrafterSide
from outrider_bench.host.fake_device import Steps
from outrider_bench.host.scripted_verifier import VerifierSide, spec_of
from outrider_verifier.engine import scheduler
from outrider_verifier.state.commands import OpenSession
from outrider_verifier.state.round_plan import RoundPlan

from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.shm import make_channel_pair

PLAN = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=60_000)


@contextmanager
def drafted(sessions: int) -> Iterator[VerifierSide]:
    """A verifier whose sessions have proposals, in lock-step."""
    ours, theirs = make_channel_pair()
    with torch.inference_mode(), closing(ours), closing(theirs):
        verifier = VerifierSide(sessions + 2, Steps(), planner="fixed", shm_channel=ours)
        drafter = DrafterSide(sessions + 2, Steps(), verifier.head)
        verifier.open(sessions, 64, PLAN)
        verifier.offer(drafter.follow(theirs))
        yield verifier


def open_one(verifier: VerifierSide, *, priority: int) -> None:
    """A session whose prompt no round has run."""
    spec = replace(spec_of("new", 40, 64, PLAN, DrafterId("bench")), priority=priority)
    nobody: Any = None
    verifier.service.core.handle_command(OpenSession(99, spec, nobody), time.monotonic())


def planned(verifier: VerifierSide, monkeypatch: pytest.MonkeyPatch) -> tuple[RoundPlan, int]:
    """The next round, and how often rows were weighed for it."""
    weighed = list[float]()
    weigh = scheduler.plan_round

    def counted(*given: Any, **named: Any) -> RoundPlan:
        weighed.append(given[1])
        return weigh(*given, **named)

    monkeypatch.setattr(scheduler, "plan_round", counted)
    return verifier.service.rounds.plan_round(time.monotonic()), len(weighed)


def test_a_prompt_beside_drafts_joins_their_round(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafted(3) as verifier:
        open_one(verifier, priority=0)
        plan, weighed = planned(verifier, monkeypatch)
    assert [str(chunk.session_id) for chunk in plan.prefill] == ["new"]
    assert len(plan.decode) == 3 and all(row.has_proposal for row in plan.decode)
    assert not weighed


def test_rows_of_a_lower_priority_give_way_to_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafted(3) as verifier:
        open_one(verifier, priority=1)
        plan, weighed = planned(verifier, monkeypatch)
    assert [str(chunk.session_id) for chunk in plan.prefill] == ["new"]
    assert not plan.decode and weighed


def test_a_session_whose_first_proposal_is_out_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    with drafted(3) as verifier:
        open_one(verifier, priority=0)
        verifier.round()
        plan, weighed = planned(verifier, monkeypatch)
    assert plan.is_empty and plan.wait_until is not None and weighed
