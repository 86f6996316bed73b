"""InFlightRound is a round that was submitted and is not finished. Other functions build the rows
and the verdicts of rounds. Nothing here posts effects to the engine's outbox."""

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
    """Expected end on the clock of `time.perf_counter`; inf if unknown."""
    hit_idle_s: float | None = None
    """Idle time of the device between the end of the previous round and the submission of this one,
    in seconds; None unless all rows of this one are hits."""
    _verdict_inputs: VerdictInputs | None = None
    _touched: int = -1

    def set_expected_end(self, verify_s: Callable[[int, int], float | None]) -> None:
        """Set `expected_end` if it is not yet known. `verify_s` takes the number of decoding
        sessions of a round and the number of verified tokens per session, and returns the round's
        estimated time in seconds, or None."""
        if math.isinf(self.expected_end):
            lasts_s = verify_s(len(self.verify), 1 + self.max_nodes)
            if lasts_s is not None:
                self.expected_end = self.began + lasts_s

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the round's largest draft from a drafter process."""
        return max([row.nodes for row in self.verify], default=0)

    @property
    def has_verdict_inputs(self) -> bool:
        """Whether the inputs of the round's verdicts were built. Without them, drafts for the
        round's outcome cannot be used."""
        return self._verdict_inputs is not None

    def verdict_inputs(self, touched: int) -> VerdictInputs | None:
        """Return the session state that the round's verdicts are built from; None if no drafter
        receives a verdict. The result is cached until `touched` (see `EngineCore`) changes."""
        if touched != self._touched:
            self._verdict_inputs, self._touched = (
                VerdictInputs.of_sessions([row.session for row in self.verify]),
                touched,
            )
        return self._verdict_inputs

    @property
    def expects_look_ahead(self) -> bool:
        """Whether drafters may send drafts for the round's possible outcomes while the round
        runs."""
        return any(
            row.session.looks_ahead and row.session.phase is not ENDED for row in self.verify
        )

    @property
    def is_all_hits(self) -> bool:
        """Whether the round has no prefill rows and each of its decode rows has a proposal that
        arrived before its prefix was committed."""
        return not self.prefill and all(row.held and row.held.is_hit for row in self.verify)

    @property
    def sessions(self) -> list[Session]:
        """All sessions of the round, prefilling sessions first."""
        return [row.session for row in self.prefill] + [row.session for row in self.verify]


def make_verify_row(session: Session, held: HeldProposal) -> VerifyRow:
    """Build the verify row of a session from its proposal. A draft that is deeper than the
    session's limits is cut."""
    if held.is_hit:
        # A hit shows that the drafter is healthy, even if earlier proposals were late.
        session.has_stalled_drafter = False
    # This is `max_draft_depth` without a call: a draft is never deeper than its number of nodes.
    tokens_left = session.spec.max_new_tokens - session.emitted - 1
    if held.nodes <= tokens_left and held.nodes <= session.draft_limit:
        return VerifyRow(session, held)
    proposal = held.proposal
    cut = trim_draft(proposal.tree, proposal.distribution, session.max_draft_depth)
    return VerifyRow(session, held, draft=cut)


def prompt_verdicts(prompts: Sequence[RowResult]) -> VerdictBatch:
    """Return the verdicts for finished prefill chunks whose sessions have a drafter."""
    rows = [
        row
        for row in prompts
        if row.new_positions and not row.ends and has_drafter_link(row.session)
    ]
    return VerdictBatch.of_current(
        [row.session for row in rows], [row.result.features for row in rows]
    )


def must_await_drafts(in_flight: InFlightRound) -> bool:
    """Return whether every live session of the round has a drafter, so that no session can continue
    before drafts arrive."""
    sessions = [session for session in in_flight.sessions if session.phase is not ENDED]
    return bool(sessions) and all(session.has_drafter for session in sessions)


def is_drafted(session: Session) -> bool:
    """Return whether the session's next round should verify drafts of a drafter."""
    return session.has_drafter and session.prefill_left == 0
