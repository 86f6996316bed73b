"""Rounds over the core's sessions: plan, submit, settle each row (engine thread only).

A runner that can run ahead has a round in flight nearly all the time: the next one is submitted
before the one in flight is settled, so that the device never waits for the host. What a session
turns out not to need (it ended, or was closed) is dropped when its round is settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from outrider.errors import InternalError, OutriderError, UnavailableError
from outrider.wire.accounting import add_round
from outrider_verifier.core import Core
from outrider_verifier.effects import RoundReport
from outrider_verifier.engine import RoundOutcome, RoundRunner, RowOutcome
from outrider_verifier.flying import InFlight, await_drafts, drafted_row, is_drafted, prompted
from outrider_verifier.halves import Halves
from outrider_verifier.packing import PrefillRow, VerifyRow
from outrider_verifier.planning import turn
from outrider_verifier.rows import cut_emission
from outrider_verifier.schedule import (
    DecodeRow,
    Limits,
    RoundPlan,
    RowState,
    plan_ahead,
    plan_beside,
    plan_drafted,
    plan_round,
)
from outrider_verifier.sessions import Session
from outrider_verifier.settled import Settled, Sheet

logger = logging.getLogger(__name__)

GIVE_WAY_S = 0.0001
"""How long this thread stands back when verdicts leave and no session can go on without a draft:
the thread that sends them needs the interpreter lock, and drafting takes longer than this."""


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
        self._flying: InFlight | None = None
        self._settled_at = 0.0
        """When the last round was reported, on the clock of `time.perf_counter`."""
        self._halves = Halves(engine.verify_s)
        self._half: int | None = None
        """Rows of a half, by the last plan; None: all sessions share a round."""
        self._idle_since = 0.0
        """When the last round's outcome was there, on the clock of `plan`."""
        self.flush: Callable[[], bool] = lambda: False
        """Called when the verdicts of a round are posted, before anything that can follow them;
        whether another thread has them now."""
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
        """What to do now; while a round is in flight, an empty plan means to settle it, at once or,
        if the plan says when to look again, once it has `landed`."""
        flying = self._flying
        turn(self._core, now, flying=None if flying is None else flying.plan)
        half = self._half = self._most_rows()
        sessions = list(self._core.sessions.values())
        held = self._core.inbox.nodes([session.handle for session in sessions])
        if flying is None and half is None and all([nodes >= 0 for nodes in held]):
            # So all are past their prompts.
            wanted = all([session.draft_wanted for session in sessions])
            names = [session.spec.session_id for session in sessions]
            drafted = plan_drafted(names, held, self._limits) if wanted else None
            if drafted is not None:
                return drafted
        rows = list(map(self._row_state, sessions, held))
        if flying is None:
            idle_since = self._idle_since
            plan = plan_round(rows, now, self._limits, idle_since=idle_since, most_rows=half)
            if plan.empty:
                self._core.book_arrivals()
            return plan
        if half is None:
            return plan_ahead(rows, flying.plan, self._limits)
        return plan_beside(rows, now, flying.plan, self._limits, most_rows=half)

    @property
    def landed(self) -> bool:
        """Whether the round in flight can be settled without waiting."""
        return self._flying is None or self._engine.landed(self._flying.flight)

    def _most_rows(self) -> int | None:
        """Rows of a half, if drafted sessions take turns; None: they share a round."""
        policy = self._core.policy
        if not (self._engine.run_ahead and policy.automatic):
            return None
        drafted = [s for s in self._core.sessions.values() if is_drafted(s)]
        if not drafted:
            return None
        nodes = 1 + max(min(s.plan.draft_tokens, s.draft_limit) for s in drafted)
        return self._halves.most_rows(len(drafted), nodes, policy.answer_s())

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
        try:
            # While the device works.
            sheet = Sheet.of([row.session for row in flying.verify])
            outcome = self._engine.collect(flying.flight)
            self._idle_since = self._clock()
            self._core.drafters.tell_round(sheet.verdicts(outcome.decoded))
            # A prompt's features take long to copy: who decodes does not wait for them.
            handed = self.flush()
            prompts = self._settle_prompts(flying.prefill, outcome.prefill)
            self._core.drafters.tell_round(prompted(prompts))
            if (self.flush() or handed) and await_drafts(flying):
                time.sleep(GIVE_WAY_S)
            rows = zip(flying.verify, outcome.decoded.rows(), strict=True)
            settled = prompts + [
                self._commit(row.session, result, row)
                for row, result in rows
                if not row.session.ended
            ]
            emitted = sum(map(self._follow_up, settled))
            total_s = self._report(flying, outcome, emitted)
            self._core.policy.observe_round(
                settled,
                seconds=total_s,
                forward_s=outcome.forward_s,
                prompts=[row.num_tokens for row in flying.prefill],
                now=self._clock(),
            )
            # Copying takes long: what clients wait for goes first.
            self.flush()
            self._keep_features(settled)
        except Exception as bug:
            self._fail(flying.sessions, bug)

    def check_device(self, bug: BaseException | None) -> None:
        """After a failure, `bug` if it is known: note whether the device is the reason."""
        if self.device_lost or self._engine.usable:
            return
        self.device_lost = True
        self._core.counters["device_losses"] += 1
        logger.critical("the device is lost", exc_info=bug)

    def _submit(self, plan: RoundPlan, began: float, waited_s: float) -> InFlight:
        prefill = [
            PrefillRow.next_of(self._core.sessions[chunk.session_id], chunk.num_tokens)
            for chunk in plan.prefill
        ]
        verify = self._verify_rows(plan.decode)
        flight = self._engine.submit(prefill, verify)
        self._core.book_arrivals()
        for row in prefill:
            row.session.prefill_sent = row.end
        return InFlight(
            plan=plan,
            prefill=prefill,
            verify=verify,
            flight=flight,
            began=began,
            waited_s=waited_s,
        )

    def _row_state(self, session: Session, held: int) -> RowState:
        """What the schedule must know of a session; `held`: nodes of its proposal, -1 if there is
        none."""
        left, remaining = session.prefill_left, session.remaining
        if session.paused:
            ahead, name = self._runs_ahead(session), session.spec.session_id
            return RowState(name, left, None, session.since, runs_ahead=ahead, remaining=remaining)
        # What `draft_wanted` says, with the budget at hand.
        wanted = remaining > 1 and session.draft_limit > 0 and session.wishes_drafts
        if held >= 0 and left == 0 and wanted:
            return RowState(session.spec.session_id, 0, held, session.since, session.proposal_at)
        awaits = session.awaits_proposal
        return RowState(
            session.spec.session_id,
            left,
            None,
            session.since,
            own_nodes=session.own_depth if session.own_draft else 0,
            awaits_proposal=awaits,
            patience_s=self._core.policy.patience(session) if awaits else 0.0,
            runs_ahead=self._runs_ahead(session),
            remaining=remaining,
        )

    def _may_stay_in_flight(self, flying: InFlight) -> bool:
        if self._half is not None and len(flying.sessions) < len(self._core.sessions):
            return True
        # Proposals need the host after their round; so no command can come between.
        return all(row.session.ended or row.held is None for row in flying.verify) and all(
            session.ended or self._runs_ahead(session) for session in flying.sessions
        )

    def _runs_ahead(self, session: Session) -> bool:
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (session.paused and self._core.policy.pauses(session))
        return self._engine.run_ahead and alone

    def _verify_rows(self, decode: Sequence[DecodeRow]) -> list[VerifyRow]:
        """The rows of a plan, with their proposals taken out of the inbox."""
        sessions = [self._core.sessions[row.session_id] for row in decode]
        drafted = [s.handle for s, row in zip(sessions, decode, strict=True) if row.drafted]
        taken = self._core.inbox.take(drafted) if drafted else []
        if len(taken) == len(sessions):
            return list(map(drafted_row, sessions, taken))
        left = iter(taken)
        rows: list[VerifyRow] = []
        for session, row in zip(sessions, decode, strict=True):
            if row.drafted:
                rows.append(drafted_row(session, next(left)))
                continue
            if row.missed:
                self._core.policy.missed(session)
                self._core.counters["patience_over"] += 1
            rows.append(VerifyRow(session, own_depth=session.own_depth))
        return rows

    def _settle_prompts(
        self, rows: Sequence[PrefillRow], results: Sequence[RowOutcome]
    ) -> list[Settled]:
        """Commit the first tokens of the prompts that are complete."""
        settled: list[Settled] = []
        for row, result in zip(rows, results, strict=True):
            self._core.counters["prefill_tokens"] += row.num_tokens
            if not row.session.ended:
                found = self._commit(row.session, result) if row.last else None
                settled.append(found or Settled(row.session, result))
        return settled

    def _commit(
        self, session: Session, result: RowOutcome, row: VerifyRow | None = None
    ) -> Settled:
        """Commit what stands; nobody is told."""
        assert result.acceptance is not None
        tokens, reason = cut_emission(
            result.acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
        )
        missed = row is not None and row.held is None and session.draft_wanted
        session.append(tokens, self._idle_since)
        session.round_id += int(row is not None)
        return Settled(session, result, tokens, reason, row, missed)

    def _follow_up(self, settled: Settled) -> int:
        """Count, emit; finish the session if that was its end."""
        session, tokens = settled.session, settled.tokens
        if settled.verified is not None:
            self._count(settled, settled.verified)
        if tokens:
            self._core.emit(session, tokens, settled.reason)
        if settled.reason is not None:
            self._finish(session)
        return len(tokens)

    def _keep_features(self, settled: Sequence[Settled]) -> None:
        """For drafters that must be caught up some day."""
        store = self._core.store
        if store is None:
            return
        for row in settled:
            if row.reason is None and row.result.features is not None:
                store.append(row.session.session_id, row.result.features)

    def _finish(self, session: Session) -> None:
        self._core.counters["finished"] += 1
        self._core.free(session)

    def _count(self, settled: Settled, row: VerifyRow) -> None:
        session, result, acceptance = settled.session, settled.result, settled.result.acceptance
        assert acceptance is not None
        proposed = row.nodes if row.drafted else result.drafted
        accepted_len = len(acceptance.accepted_nodes)
        fallback = settled.missed or (row.own_depth > 0 and result.drafted == 0)
        counters = self._core.counters
        if fallback:
            counters["fallback_rounds"] += 1
        if session.paused:
            counters["paused_rounds"] += 1
        if proposed:
            counters["accepted_tokens"] += accepted_len
            counters["proposed_tokens"] += proposed
        if row.drafted:
            counters["proposals_used"] += 1
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

    def _report(self, flying: InFlight, outcome: RoundOutcome, emitted: int) -> float:
        """Post what the round took; returns its seconds, without waiting."""
        messages = {id(row.held.proposals): row.held.proposals for row in flying.verify if row.held}
        drafted_s = max((message.draft_us for message in messages.values()), default=0) / 1e6
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
