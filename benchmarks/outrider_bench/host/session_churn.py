"""Host time of plain rounds while sessions end and new ones start.

It is measured as in `outrider_bench.host.plain`, but sessions start and end, as they do hundreds of
times per second with a small model. The time of a round here includes the cost of opening and
closing sessions and of the messages to drafters about them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import torch

from outrider_bench.host.plain import WAYS, PlainSide
from outrider_bench.report import format_table

WIDTH: Final = 512
"""Number of values of a feature of a small model."""
PROMPTS: Final = (60, 180)
"""Smallest and largest number of tokens of a prompt."""
SETTLING: Final = 60
"""Number of warm-up rounds, which are not measured."""


class ChurningSide(PlainSide):
    """Work of a verifier's engine thread whose sessions end and are replaced immediately."""

    def __init__(self, sessions: int, answers: int, way: str) -> None:
        super().__init__(sessions, 4 * answers, way, width=WIDTH)
        self._sessions, self._answers = sessions, answers
        self._random = random.Random(0)
        self.opened = self.told = 0
        # One stays, so that nothing is forgotten of their kind.
        for session in list(self._core.sessions.values())[1:]:
            self._core.free_session(session)
        self.deliver_verdicts()

    def replacing_round(self) -> None:
        """Open a new session for each one that has ended, plan and submit a round, and process the
        results of the previous one."""
        self._steps.begin()
        while len(self._core.sessions) < self._sessions:
            self.opened += 1
            length = self._random.randint(self._answers // 2, 3 * self._answers // 2)
            prompt = self._random.randint(*PROMPTS)
            ticket = self._sessions + self.opened
            self.open_one(ticket, prompt, length, self.plan, drafted=self.drafted)
        self._steps.mark("verifier: opened")
        self.plan_and_run("verifier: features kept")
        self.told += self.deliver_verdicts()
        self._steps.mark("verifier: drafters told")
        self._steps.end_round()


def run(counts: Sequence[int], rounds: int, answers: int) -> None:
    """Print a table of the mean microseconds of a round and of each of its steps on the verifier's
    CPU.

    It has a column for each number of sessions in `counts` and each case of WAYS. Answers have
    `answers` tokens on average. The cases alternate round by round.
    """
    found: dict[str, ChurningSide] = {}
    with torch.inference_mode():
        for count in counts:
            sides = {way: ChurningSide(count, answers, way) for way in WAYS}
            for number in range(SETTLING + rounds):
                for side in sides.values():
                    if number == SETTLING:
                        side.steps.taken.clear()
                        side.opened = side.told = 0
                    side.replacing_round()
            found |= {f"{count}, {name}": side for name, side in sides.items()}
    taken = [{n: sum(us) / rounds for n, us in s.steps.taken.items()} for s in found.values()]
    names = dict.fromkeys(name for steps in taken for name in steps)
    rows = [[name, *(f"{steps.get(name, 0.0):.0f}" for steps in taken)] for name in names]
    rows.append(["**verifier**", *(f"{sum(steps.values()):.0f}" for steps in taken)])
    for name in ("opened", "told"):
        each = (f"{getattr(side, name) / rounds:.2f}" for side in found.values())
        rows.append([f"{name} a round", *each])
    print(format_table(["us", *found], rows))
