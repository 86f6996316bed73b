"""InFlightRound: a submitted, unfinished round; and helpers that make its rows. No effects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider_verifier.exchange.proposal_inbox import HeldProposal
from outrider_verifier.exchange.verdict_builder import VerdictBatch
from outrider_verifier.model_runner.batch import PrefillRow, VerifyRow, trim_draft
from outrider_verifier.model_runner.interface import RoundHandle
from outrider_verifier.model_runner.results import RowResult, VerdictInputs, has_drafter_link
from outrider_verifier.state.round_plan import RoundPlan
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightRound:
    """A round that was submitted and is not finished."""

    plan: RoundPlan
    prefill: list[PrefillRow]
    verify: list[VerifyRow]
    flight: RoundHandle
    began: float
    waited_s: float
    expected_end: float = math.inf
    """When it should end, on the clock of `time.perf_counter`; inf: not known."""
    hit_idle_s: float | None = None
    """See `RoundReport`."""
    _verdict_inputs: VerdictInputs | None = None
    _touched: int = -1

    def set_expected_end(self, verify_s: Callable[[int, int], float | None]) -> None:
        """Note when it should end, by what a round of so many rows and nodes takes."""
        if math.isinf(self.expected_end):
            lasts_s = verify_s(len(self.verify), 1 + self.max_nodes)
            if lasts_s is not None:
                self.expected_end = self.began + lasts_s

    @property
    def max_nodes(self) -> int:
        """Nodes of its largest draft from outside."""
        return max([row.nodes for row in self.verify], default=0)

    @property
    def has_verdict_inputs(self) -> bool:
        """Whether the round stays in flight until it lands, because drafts for its outcome come."""
        return self._verdict_inputs is not None

    def verdict_inputs(self, touched: int) -> VerdictInputs | None:
        """What decides over the verdicts, with the sessions as they are; None if no drafter hears
        of the round. Made anew only where `touched` (see `EngineCore`) is not what it was."""
        if touched != self._touched:
            self._verdict_inputs, self._touched = (
                VerdictInputs.of_sessions([row.session for row in self.verify]),
                touched,
            )
        return self._verdict_inputs

    @property
    def expects_look_ahead(self) -> bool:
        """Whether drafts for what the round may emit are to be expected while it runs."""
        return any(
            row.session.looks_ahead and row.session.phase is not ENDED for row in self.verify
        )

    @property
    def is_all_hits(self) -> bool:
        """Whether all that the round verifies was there before its prefix was."""
        return not self.prefill and all(row.held and row.held.is_hit for row in self.verify)

    @property
    def sessions(self) -> list[Session]:
        """All sessions of the round."""
        return [row.session for row in self.prefill] + [row.session for row in self.verify]


def make_verify_row(session: Session, held: HeldProposal) -> VerifyRow:
    """Build the verify row of a session; drafts beyond the session's limits are cut."""
    if held.is_hit:
        # So its drafter is well, whatever came late before.
        session.has_stalled_drafter = False
    # What `max_draft_depth` says, without a call; no node is deeper than there are nodes.
    tokens_left = session.spec.max_new_tokens - session.emitted - 1
    if held.nodes <= tokens_left and held.nodes <= session.draft_limit:
        return VerifyRow(session, held)
    proposal = held.proposal
    cut = trim_draft(proposal.tree, proposal.distribution, session.max_draft_depth)
    return VerifyRow(session, held, draft=cut)


def prompt_verdicts(prompts: Sequence[RowResult]) -> VerdictBatch:
    """What drafters hear of prompts, which are settled already."""
    rows = [
        row
        for row in prompts
        if row.new_positions and not row.ends and has_drafter_link(row.session)
    ]
    return VerdictBatch.of_current(
        [row.session for row in rows], [row.result.features for row in rows]
    )


def must_await_drafts(in_flight: InFlightRound) -> bool:
    """Whether no session of the round can go on without a draft."""
    sessions = [session for session in in_flight.sessions if session.phase is not ENDED]
    return bool(sessions) and all(session.has_drafter for session in sessions)


def is_drafted(session: Session) -> bool:
    """Whether the session's next round is to verify a drafter's drafts."""
    return session.has_drafter and session.prefill_left == 0
