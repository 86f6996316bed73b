"""Host time of plain decoding with speculation turned off, compared with that without a drafter.

It is measured as in `outrider bench host`, but with a round always in flight that verifies nothing.
Sessions for which the planner has turned speculation off must decode as fast as sessions without a
drafter. The cases alternate round by round in one process, so that other load on the machine
affects all of them equally.
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
"""Name of the case in which sessions want drafts and no drafter is connected."""
WAYS: Final = {
    "no drafter": None,
    "n-gram, paused": DraftMethod.NGRAM,
    "head, paused": DraftMethod.EAGLE3,
    LOST: DraftMethod.EAGLE3,
}
"""Cases in which sessions decode without drafts, each with the draft method of its plans (None: no
drafts)."""


class PlainSide(LookAheadSide):
    """Work of a verifier's engine thread with sessions that decode plainly and a round always in
    flight."""

    def __init__(self, sessions: int, rounds: int, way: str, *, width: int = WIDTH) -> None:
        """Open the sessions and run some rounds. `way` is a key of WAYS."""
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
        """Leave the planner no other choice than plain decoding."""
        policy: Any = self._core.policy
        for workload in policy.workloads:
            workload.shapes, workload.controller = (OFF,), SpeculationController()
            workload.shape = OFF
        policy.changed = True

    def plain_round(self) -> None:
        """Plan and submit a round, then process the results of the round before it."""
        self._steps.begin()
        assert self.plan_and_run("verifier: features kept"), "nothing to do"
        assert self._rounds.has_round_in_flight, "plain rounds run ahead"
        self.service.outbox.take_effects()
        self._steps.end_round()


def measure(sessions: int, rounds: int) -> dict[str, Steps]:
    """Run `rounds` rounds of each case of WAYS, alternating between the cases after every round.
    Return the times of the steps by case."""
    with torch.inference_mode():
        sides = {way: PlainSide(sessions, rounds, way) for way in WAYS}
        for _ in range(rounds):
            for side in sides.values():
                side.plain_round()
    return {name: side.steps for name, side in sides.items()}


def run(counts: Sequence[int], rounds: int) -> None:
    """Print the microseconds of a round and of each of its steps on the verifier's CPU, for each
    number of sessions and each case of WAYS."""
    found = {
        f"{count}, {name}": steps
        for count in counts
        for name, steps in measure(count, rounds).items()
    }
    print(steps_table(found))
