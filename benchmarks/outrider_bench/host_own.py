"""The verifier's share of a round whose drafts are made in its own process.

As `host`, but rounds run ahead: nothing that they need comes from outside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from outrider.spec.plan import DraftMethod, Plan
from outrider_bench.host_canned import Steps
from outrider_bench.host_verifier import VerifierSide
from outrider_bench.report import table


class OwnSide(VerifierSide):
    """A verifier's engine thread beside a head of its own, a round always in flight."""

    def __init__(self, sessions: int, rounds: int, length: int) -> None:
        """`length`: tokens of a draft."""
        self.steps = Steps()
        super().__init__(sessions, self.steps, planner="automatic", own_draft=length)
        plan = Plan(method=DraftMethod.EAGLE3, draft_tokens=length)
        self.open(sessions, min((length + 1) * (rounds + 32), 1900), plan, drafted=False)
        own: Any = self._rounds
        own._attempt = self.until(None, own._attempt, "verifier: submitted")
        own._collect = self.until("verifier: made ready", own._collect, "verifier: outcome read")
        own._accounts.follow_up = self.until(
            "verifier: committed", own._accounts.follow_up, "verifier: accounts, events"
        )
        policy: Any = self._core.policy
        policy.observe_round = self.until(
            "verifier: report", policy.observe_round, "verifier: planner"
        )
        for _ in range(8):
            self.round()
        self.steps.taken.clear()

    def round(self) -> None:
        """Plan and submit a round, settle the one before it."""
        self._steps.begin()
        plan = self._rounds.plan(time.monotonic())
        self._steps.mark("verifier: planned")
        if plan.empty:
            self._rounds.settle()
        else:
            self._rounds.run(plan)
        self._steps.mark("verifier: rest")
        self._outbox.clear()
        self._core.seal()
        self._steps.end_round()


def run(counts: Sequence[int], rounds: int, length: int) -> None:
    """Print microseconds by step, and of a whole round, with so many sessions."""
    found: dict[int, Steps] = {}
    with torch.inference_mode():
        for count in counts:
            side = OwnSide(count, rounds, length)
            for _ in range(rounds):
                side.round()
            found[count] = side.steps
    names = list(dict.fromkeys(name for steps in found.values() for name in steps.taken))
    rows = [[name, *(f"{steps.lowest(name):.0f}" for steps in found.values())] for name in names]
    totals = (sum(map(steps.lowest, names)) for steps in found.values())
    rows.append(["**verifier**", *(f"{total:.0f}" for total in totals)])
    print(table(["us", *(f"{count} sessions" for count in found)], rows))
