"""Host overhead of plain decoding with speculation off, beside that without a drafter.

As `host`, but a round is always in flight and verifies nothing. Sessions whose planner has turned
speculation off must decode as fast as sessions without a drafter: the configurations alternate
round by round in one process, so that other load on the machine affects all of them equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from outrider_verifier.planner.speculation_controller import OFF, SpeculationController

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider_bench.host.fake_device import Steps, steps_table
from outrider_bench.host.scripted_verifier import WIDTH, LookAheadSide

LOST: Final = "head, nobody drafts"
"""Name of the case in which only the missing drafter prevents speculation."""
WAYS: Final = {
    "no drafter": None,
    "n-gram, paused": DraftMethod.NGRAM,
    "head, paused": DraftMethod.EAGLE3,
    LOST: DraftMethod.EAGLE3,
}
"""Ways in which sessions come to decode without drafts, and their speculation plans."""


class PlainSide(LookAheadSide):
    """Work of a verifier's engine thread with plain sessions, a round always in flight."""

    def __init__(self, sessions: int, rounds: int, way: str, *, width: int = WIDTH) -> None:
        """`way`: one of WAYS."""
        method = WAYS[way]
        super().__init__(sessions, width=width)
        self.plan = (
            SpeculationPlan() if method is None else SpeculationPlan(method=method, draft_tokens=4)
        )
        self.drafted = method is not None and way != LOST
        self.open(sessions, rounds + 64, self.plan, drafted=self.drafted)
        if way != LOST:
            self._turn_speculation_off()
        self.mark_steps("verifier: accounts, events")
        for _ in range(8):
            self.plain_round()
        self.steps.taken.clear()

    def _turn_speculation_off(self) -> None:
        """Leave the policy nothing but plain decoding to choose."""
        policy: Any = self._core.policy
        for workload in policy.workloads:
            workload.shapes, workload.controller = (OFF,), SpeculationController()
            workload.shape = OFF
        policy.changed = True

    def plain_round(self) -> None:
        """Plan and submit a round, settle the one before it."""
        self._steps.begin()
        assert self.plan_and_run("verifier: features kept"), "nothing to do"
        assert self._rounds.has_round_in_flight, "plain rounds run ahead"
        self.service.outbox.take_effects()
        self._steps.end_round()


def measure(sessions: int, rounds: int) -> dict[str, Steps]:
    """Run `rounds` rounds of each way in turn. Return the times of the steps by way."""
    with torch.inference_mode():
        sides = {way: PlainSide(sessions, rounds, way) for way in WAYS}
        for _ in range(rounds):
            for side in sides.values():
                side.plain_round()
    return {name: side.steps for name, side in sides.items()}


def run(counts: Sequence[int], rounds: int) -> None:
    """Print the microseconds of each step and of a whole round, by way and number of sessions."""
    found = {
        f"{count}, {name}": steps
        for count in counts
        for name, steps in measure(count, rounds).items()
    }
    print(steps_table(found))
