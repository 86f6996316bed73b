"""A round on its way, and what its rows are made of (no effects)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider_verifier.exchange.proposal_inbox import Held
from outrider_verifier.exchange.verdict_builder import Told
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow
from outrider_verifier.model_runner.interface import Flight
from outrider_verifier.model_runner.results import Settled, Sheet, is_told
from outrider_verifier.model_runner.rows import trim
from outrider_verifier.state.round_plan import RoundPlan
from outrider_verifier.state.session import Session


@dataclass(slots=True, kw_only=True, eq=False)
class InFlight:
    """A round that was submitted and is not settled."""

    plan: RoundPlan
    prefill: list[PrefillRow]
    verify: list[VerifyRow]
    flight: Flight
    began: float
    waited_s: float
    lands_at: float = math.inf
    """When it should end, on the clock of `time.perf_counter`; inf: not known."""
    hit_idle_s: float | None = None
    """See `RoundReport`."""
    _sheet: Sheet | None = None
    _touched: int = -1

    def expect(self, verify_s: Callable[[int, int], float | None]) -> None:
        """Note when it should end, by what a round of so many rows and nodes takes."""
        if math.isinf(self.lands_at):
            lasts_s = verify_s(len(self.verify), 1 + self.most_nodes)
            if lasts_s is not None:
                self.lands_at = self.began + lasts_s

    @property
    def most_nodes(self) -> int:
        """Nodes of its largest draft from outside."""
        return max([row.nodes for row in self.verify], default=0)

    @property
    def ready(self) -> bool:
        """Whether there is a sheet: the round stays in flight until it lands."""
        return self._sheet is not None

    def sheet(self, touched: int) -> Sheet:
        """What decides over the verdicts, with the sessions as they are; made anew only where
        `touched` (see `Core`) is not what it was."""
        if self._sheet is None or touched != self._touched:
            self._sheet, self._touched = Sheet.of([row.session for row in self.verify]), touched
        return self._sheet

    @property
    def looks_ahead(self) -> bool:
        """Whether drafts for what the round may emit are to be expected while it runs."""
        return any(row.session.looks_ahead and not row.session.ended for row in self.verify)

    @property
    def all_hits(self) -> bool:
        """Whether all that the round verifies was there before its prefix was."""
        return not self.prefill and all(row.held and row.held.ahead for row in self.verify)

    @property
    def sessions(self) -> list[Session]:
        """All sessions of the round."""
        return [row.session for row in self.prefill] + [row.session for row in self.verify]


def drafted_row(session: Session, held: Held) -> VerifyRow:
    """A row with what of a proposal may stand."""
    if held.ahead:
        # So its drafter is well, whatever came late before.
        session.suspect = False
    # What `max_draft_depth` says, without a call; no node is deeper than there are nodes.
    room = session.spec.max_new_tokens - session.emitted - 1
    if held.nodes <= room and held.nodes <= session.draft_limit:
        return VerifyRow(session, held)
    proposal = held.proposal
    cut = trim(proposal.tree, proposal.law, session.max_draft_depth)
    return VerifyRow(session, held, draft=cut)


def prompted(prompts: Sequence[Settled]) -> Told:
    """What drafters hear of prompts, which are settled already."""
    rows = [row for row in prompts if row.fresh and not row.ends and is_told(row.session)]
    return Told.present([row.session for row in rows], [row.result.features for row in rows])


def await_drafts(flying: InFlight) -> bool:
    """Whether no session of the round can go on without a draft."""
    sessions = [session for session in flying.sessions if not session.ended]
    return bool(sessions) and all(session.has_drafter for session in sessions)


def is_drafted(session: Session) -> bool:
    """Whether the session's next round is to verify a drafter's drafts."""
    return session.has_drafter and session.prefill_left == 0
