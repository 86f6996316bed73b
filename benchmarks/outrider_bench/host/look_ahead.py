"""Host time of a verifier round with look-ahead hits, so that the next round starts immediately.

It is measured as in `outrider bench host`, but each session gets several drafts for outcomes of the
round in flight, one of which is right. The verifier therefore submits the next round before it
sends the verdicts of this one. The critical path lies between the arrival of a round's results and
the submission of the next round.
"""

from __future__ import annotations

import time
from typing import TypeVar

import numpy as np
import torch

from outrider.spec.digest import extend_digest
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from outrider.wire.codec import encode_drafter_message
from outrider.wire.messages import Proposal, Proposals
from outrider_bench.host.fake_device import BESIDE, Steps
from outrider_bench.host.scripted_verifier import LENGTH, VerifierSide

T = TypeVar("T")

EMITTED = tuple(range(7, 7 + LENGTH))
"""Tokens that every scripted round emits."""
_DRAFT = DraftTree(
    np.full(LENGTH, 5, dtype=np.int32),
    np.arange(-1, LENGTH - 1, dtype=np.int32),
    np.zeros(LENGTH, dtype=np.float32),
)


class LookAheadHits(VerifierSide):
    """Work of a verifier's engine thread whose rounds are in flight while drafts arrive."""

    offers = BESIDE

    def __init__(self, sessions: int, steps: Steps, *, offered: int) -> None:
        """Create the verifier. `offered` is the number of drafts, each for another outcome, that a
        session gets per round."""
        super().__init__(sessions, steps, planner="fixed")
        self._offered = offered
        rounds = self._rounds
        self.bracket(
            rounds._engine, "collect_round", "verifier: sheet", "verifier: outcome settled"
        )
        submitted = "verifier: submitted" + BESIDE
        self.bracket(rounds, "_submit_early_round", "verifier: drafts found", submitted)

    def begin(self) -> None:
        """Submit a round with a first draft of each session, and leave it in flight."""
        self.offer([self._frame(1, ())])
        plan = self._rounds.plan_round(time.monotonic())
        self._rounds.run_round(plan)
        assert self._rounds.has_round_in_flight

    def offer_ahead(self) -> None:
        """Process drafts for the outcomes of the round in flight, and prepare the next round."""
        self.offer([self._frame(self._offered, EMITTED)])
        self._steps.begin()
        self._rounds.plan_round(time.monotonic())
        self._steps.mark("verifier: made ready" + BESIDE)

    def settle(self) -> None:
        """Process the results of the round in flight. The verifier submits the next round before
        the rest of this work."""
        self._steps.begin()
        self._rounds.finish_round(go_on=True)
        self._steps.mark("verifier: features kept" + BESIDE)
        assert self._rounds.has_round_in_flight, "every round is a hit"
        self.service.outbox.take_effects()

    def _frame(self, offered: int, emitted: tuple[int, ...]) -> bytes:
        """Return an encoded message of `offered` drafts per session. The one in the middle is for
        the outcome `emitted`, the others are for other outcomes."""
        entries: list[Proposal] = []
        for session in self._core.sessions.values():
            digest = int(self._core.verdict_builder._digests[session.handle])
            for place in range(offered):
                tokens = emitted if place == offered // 2 else (*emitted[:-1], 100 + place)
                entries.append(
                    Proposal(
                        handle=session.handle,
                        prefix_digest=extend_digest(digest, tokens if emitted else ()),
                        prefix_len=session.length + len(emitted),
                        tree=_DRAFT,
                    )
                )
        return encode_drafter_message(Proposals.of_proposals(entries))


def measure(sessions: int, rounds: int, *, offered: int, pause_s: float) -> Steps:
    """Run `rounds` rounds in which every session has a look-ahead hit, and return the times of
    their steps. `pause_s` is the time of a round on the device. CPU caches may be cold after it."""
    steps = Steps()
    with torch.inference_mode():
        verifier = LookAheadHits(sessions, steps, offered=offered)
        plan = SpeculationPlan(
            method=DraftMethod.EAGLE3, draft_tokens=LENGTH, proposal_timeout_ms=60_000, look_ahead=1
        )
        verifier.open(sessions, LENGTH * (rounds + 4), plan)
        verifier.begin()
        for count in range(rounds + 2):
            if count == 2:
                steps.taken.clear()
            time.sleep(pause_s / 2)
            verifier.offer_ahead()
            time.sleep(pause_s / 2)
            verifier.settle()
            steps.end_round()
    return steps
