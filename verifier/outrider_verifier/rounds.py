"""Rounds over the core's sessions: plan, submit, settle each row (engine thread only).

A runner that can run ahead has a round in flight nearly all the time: the next one is submitted
before the one in flight is settled, so that the device never waits for the host. What a session
turns out not to need (it ended, or was closed) is dropped when its round is settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.errors import InternalError, OutriderError, UnavailableError
from outrider.spec.accounting import add_round
from outrider_verifier.core import Core
from outrider_verifier.effects import RoundReport
from outrider_verifier.engine import Flight, RoundOutcome, RoundRunner, RowOutcome
from outrider_verifier.handover import Told
from outrider_verifier.packing import PrefillRow, VerifyRow
from outrider_verifier.planning import turn
from outrider_verifier.rows import cut_emission, trim
from outrider_verifier.schedule import (
    DecodeRow,
    Limits,
    RoundPlan,
    RowState,
    plan_ahead,
    plan_round,
)
from outrider_verifier.sessions import Session
from outrider_verifier.settled import Settled

logger = logging.getLogger(__name__)

GIVE_WAY_S = 0.0001
"""How long this thread stands back when verdicts leave and no session can go on without a draft:
the thread that sends them needs the interpreter lock, and drafting takes longer than this."""


@dataclass(slots=True, kw_only=True, eq=False)
class _InFlight:
    """A round that was submitted and is not settled."""

    plan: RoundPlan
    prefill: list[PrefillRow]
    verify: list[VerifyRow]
    flight: Flight
    began: float
    waited_s: float

    @property
    def sessions(self) -> list[Session]:
        """All sessions of the round."""
        return [row.session for row in self.prefill] + [row.session for row in self.verify]


def device_lost_error() -> UnavailableError:
    """For whoever is served by, or calls, a verifier whose device does not work any more."""
    return UnavailableError("the verifier has lost its device", reason="DEVICE_LOST")


class Rounds:
    """Runs rounds on behalf of the loop; at most two are submitted and not settled."""

    def __init__(
        self,
        core: Core,
        engine: RoundRunner,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._engine = engine
        self._limits = limits
        self._clock = clock
        self._flying: _InFlight | None = None
        self._settled_at = 0.0
        """When the last round was reported, on the clock of `time.perf_counter`."""
        self._idle_since = 0.0
        """When the last round's outcome was there, on the clock of `plan`."""
        self._told: list[Told] = []
        """Of the round that is being settled: what drafters are to hear."""
        self.flush: Callable[[], None] = lambda: None
        """Called when the verdicts of a round are posted, before anything that can follow them."""
        self.device_lost = False
        """Whether the device was found not to work after a failure; no round can follow."""

    @property
    def flying(self) -> bool:
        """Whether a round is in flight."""
        return self._flying is not None

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        self._engine.enter_thread()

    def plan(self, now: float) -> RoundPlan:
        """What to do now; while a round is in flight, an empty plan means to settle it."""
        turn(self._core, now, flying=self._flying is not None)
        rows = [self._row_state(session) for session in self._core.sessions.values()]
        if self._flying is not None:
            return plan_ahead(rows, self._flying.plan, self._limits)
        return plan_round(rows, now, self._limits, idle_since=self._idle_since)

    def run(self, plan: RoundPlan, *, waited_s: float = 0.0, spent_s: float = 0.0) -> None:
        """Submit a round, then settle the one before it; the new one too unless the next round of
        its sessions could be submitted before that.

        An exception inside a round fails the sessions of that round only. `spent_s` is what
        taking commands and planning cost; it counts as part of the round.
        """
        began = time.perf_counter() - spent_s
        flying, failure = None, None
        failed: list[Session] = []
        try:
            flying = self._submit(plan, began, waited_s)
        except Exception as bug:
            failure = bug
            failed = [self._core.sessions[name] for name in plan.session_ids]
        # What the round in flight emitted counts even where its sessions cannot go on.
        self.settle()
        self._flying = flying
        if failure is not None:
            self._fail(failed, failure)
        elif flying is not None and not self._may_stay_in_flight(flying):
            self.settle()

    def settle(self) -> None:
        """Wait for the round in flight and act on its outcome; no-op if there is none.

        On a lost device it is dropped; its sessions have yet to be failed.
        """
        flying, self._flying = self._flying, None
        if flying is None or self.device_lost:
            return
        self._told.clear()
        try:
            outcome = self._engine.collect(flying.flight)
            self._idle_since = self._clock()
            rows = [
                self._settle_prefill(row, result)
                for row, result in zip(flying.prefill, outcome.prefill, strict=True)
            ]
            rows += [
                self._settle_verify(row, result)
                for row, result in zip(flying.verify, outcome.verify, strict=True)
            ]
            told, self._told = self._told, []
            self._core.tell_round(told)
            settled = [row for row in rows if row is not None]
            self.flush()
            if settled and all(map(_awaits_a_draft, settled)):
                time.sleep(GIVE_WAY_S)
            emitted = sum(map(self._follow_up, settled))
            total_s = self._report(flying, outcome, emitted)
            self._core.policy.observe_round(
                settled,
                seconds=total_s,
                forward_s=outcome.forward_s,
                prompts=[row.num_tokens for row in flying.prefill],
                now=self._clock(),
            )
        except Exception as bug:
            self._fail(flying.sessions, bug)

    def check_device(self, bug: BaseException | None) -> None:
        """After a failure, `bug` if it is known: note whether the device is the reason."""
        if self.device_lost or self._engine.usable:
            return
        self.device_lost = True
        self._core.counters["device_losses"] += 1
        logger.critical("the device is lost", exc_info=bug)

    def _submit(self, plan: RoundPlan, began: float, waited_s: float) -> _InFlight:
        prefill = [
            PrefillRow.next_of(self._core.sessions[chunk.session_id], chunk.num_tokens)
            for chunk in plan.prefill
        ]
        verify = [self._verify_row(row) for row in plan.decode]
        flight = self._engine.submit(prefill, verify)
        for row in prefill:
            row.session.prefill_sent = row.end
        return _InFlight(
            plan=plan,
            prefill=prefill,
            verify=verify,
            flight=flight,
            began=began,
            waited_s=waited_s,
        )

    def _row_state(self, session: Session) -> RowState:
        nodes = None
        left = session.prefill_left
        if left == 0 and session.draft_wanted:
            nodes = self._core.inbox.peek(session.handle)
        awaits = nodes is None and session.awaits_proposal
        return RowState(
            session_id=session.session_id,
            prefill_left=left,
            nodes=nodes,
            own_nodes=session.own_depth,
            awaits_proposal=awaits,
            since=session.since,
            proposal_at=session.proposal_at,
            patience_s=self._core.policy.patience(session) if awaits else 0.0,
            runs_ahead=self._runs_ahead(session),
            remaining=session.remaining,
        )

    def _may_stay_in_flight(self, flying: _InFlight) -> bool:
        # Proposals need the host after their round; so no command can come between.
        return all(row.session.ended or row.proposal is None for row in flying.verify) and all(
            session.ended or self._runs_ahead(session) for session in flying.sessions
        )

    def _runs_ahead(self, session: Session) -> bool:
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (session.paused and self._core.policy.pauses(session))
        return self._engine.run_ahead and alone

    def _verify_row(self, row: DecodeRow) -> VerifyRow:
        session = self._core.sessions[row.session_id]
        if row.missed:
            self._core.policy.missed(session)
            self._core.counters["patience_over"] += 1
        if not session.draft_wanted:
            return VerifyRow(session=session, own_depth=session.own_depth)
        proposal = self._core.inbox.take(session.handle)
        if proposal is None:
            return VerifyRow(session=session)
        draft = trim(proposal.tree, proposal.law, session.max_draft_depth)
        return VerifyRow(session=session, proposal=proposal, draft=draft)

    def _settle_prefill(self, row: PrefillRow, result: RowOutcome) -> Settled | None:
        """Commit the first token if the prompt is complete, tell the drafter."""
        session = row.session
        self._core.counters["prefill_tokens"] += row.num_tokens
        if session.ended:
            return None
        if not row.last:
            self._tell(session, result)
            return Settled(session, result)
        return self._commit(session, result)

    def _settle_verify(self, row: VerifyRow, result: RowOutcome) -> Settled | None:
        """Commit what stands, tell the drafter."""
        return None if row.session.ended else self._commit(row.session, result, row)

    def _commit(
        self, session: Session, result: RowOutcome, row: VerifyRow | None = None
    ) -> Settled:
        assert result.acceptance is not None
        tokens, reason = cut_emission(
            result.acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
        )
        missed = row is not None and row.proposal is None and session.draft_wanted
        session.append(tokens, self._clock())
        session.round_id += int(row is not None)
        if reason is None:
            self._tell(session, result)
        return Settled(session, result, tokens, reason, row, missed)

    def _follow_up(self, settled: Settled) -> int:
        """Keep the features, count, emit; finish the session if that was its end."""
        session, result, tokens = settled.session, settled.result, settled.tokens
        if settled.verified is not None:
            self._count(settled, settled.verified)
        if tokens:
            self._core.emit(session, tokens, settled.reason)
        if settled.reason is not None:
            self._finish(session)
            return len(tokens)
        if self._core.store is not None and result.features is not None:
            self._core.store.append(session.session_id, result.features)
        return len(tokens)

    def _tell(self, session: Session, result: RowOutcome) -> None:
        if session.spec.drafter_id is not None and not session.paused:
            self._told.append(Told(session, result.features))

    def _finish(self, session: Session) -> None:
        self._core.counters["finished"] += 1
        self._core.free(session)

    def _count(self, settled: Settled, row: VerifyRow) -> None:
        session, result, acceptance = settled.session, settled.result, settled.result.acceptance
        assert acceptance is not None
        proposed = result.drafted if row.draft is None else len(row.draft.tree)
        accepted_len = len(acceptance.accepted_nodes)
        fallback = settled.missed or (row.own_depth > 0 and result.drafted == 0)
        counters = self._core.counters
        counters["fallback_rounds"] += int(fallback)
        counters["paused_rounds"] += int(session.paused)
        counters["accepted_tokens"] += accepted_len
        counters["proposed_tokens"] += proposed
        counters["proposals_used"] += int(row.draft is not None)
        session.stats = add_round(
            session.stats,
            proposed=proposed,
            accepted_len=min(accepted_len, len(settled.tokens)),
            emitted=len(settled.tokens),
            fallback=fallback,
            target_only=acceptance.used_target_only_fallback,
            planned=self._core.policy.planned(session),
        )

    def _fail(self, sessions: Sequence[Session], bug: Exception) -> None:
        self._core.counters["failed_rounds"] += 1
        self.check_device(bug)
        error: OutriderError
        if self.device_lost:
            error = device_lost_error()
        else:
            logger.error("round failed", exc_info=bug, extra={"sessions": len(sessions)})
            error = InternalError(
                f"the round failed: {type(bug).__name__}: {bug}", reason="ROUND_FAILED"
            )
        for session in sessions:
            if not session.ended:
                self._core.fail(session, error)

    def _report(self, flying: _InFlight, outcome: RoundOutcome, emitted: int) -> float:
        """Post what the round took; returns its seconds, without waiting."""
        proposals = [row.proposal for row in flying.verify if row.proposal is not None]
        drafted_s = max((proposal.draft_us for proposal in proposals), default=0) / 1e6
        now = time.perf_counter()
        # A round that ran ahead began while the one before it was in flight: its share of the
        # time is what passed since that one was settled.
        total_s = now - max(flying.began, self._settled_at)
        self._settled_at = now
        self._core.counters["rounds"] += 1
        self._core.counters["emitted_tokens"] += emitted
        self._core.post(
            RoundReport(
                total_s=total_s,
                forward_s=outcome.forward_s,
                accept_s=outcome.accept_s,
                project_s=outcome.project_s,
                draft_s=outcome.draft_s,
                waited_s=flying.waited_s,
                drafted_s=min(drafted_s, flying.waited_s),
                rows=outcome.rows,
                verify_rows=len(flying.verify),
                prefill_tokens=sum(row.num_tokens for row in flying.prefill),
                emitted=emitted,
            )
        )
        return total_s


def _awaits_a_draft(row: Settled) -> bool:
    return row.session.link_id is not None and not row.session.paused
