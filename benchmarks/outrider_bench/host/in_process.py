"""Host time of a verifier round with in-process drafts.

It is measured as in `outrider bench host`, but with a round always in flight, because rounds need
no proposals from other processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider_bench.host.fake_device import Steps, steps_table
from outrider_bench.host.scripted_verifier import LookAheadSide


class InProcessSide(LookAheadSide):
    """Work of a verifier's engine thread with an in-process drafter and a round always in
    flight."""

    def __init__(self, sessions: int, rounds: int, length: int) -> None:
        """Open the sessions and run some rounds. `length` is the number of tokens of a draft."""
        super().__init__(sessions, in_process_draft=length)
        plan = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=length)
        self.open(sessions, min((length + 1) * (rounds + 32), 1900), plan, drafted=False)
        self.mark_steps("verifier: report")
        accounts, after = self._rounds._accounts, "verifier: accounts, events"
        self.bracket(accounts, "record_rows", "verifier: committed", after)
        for _ in range(8):
            self.round()
        self.steps.taken.clear()

    def round(self) -> None:
        """Plan and submit a round, then process the results of the round before it."""
        self._steps.begin()
        self.plan_and_run("verifier: rest")
        self.service.outbox.take_effects()
        self._steps.end_round()


def run(counts: Sequence[int], rounds: int, length: int) -> None:
    """Print the microseconds of each step and of a whole round, for each number of sessions."""
    found: dict[str, Steps] = {}
    with torch.inference_mode():
        for count in counts:
            side = InProcessSide(count, rounds, length)
            for _ in range(rounds):
                side.round()
            found[f"{count} sessions"] = side.steps
    print(steps_table(found))
