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
from outrider.spec.tree import is_chain
from outrider.wire.messages import FinishReason
from outrider_verifier.core import Core
from outrider_verifier.effects import RoundReport
from outrider_verifier.engine import Flight, RoundOutcome, RoundRunner, RowOutcome
from outrider_verifier.packing import PrefillRow, VerifyRow
from outrider_verifier.policy import Verified
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
    finishing: list[bool]
    """By prefill row: whether its prompt ends in this round."""
    flight: Flight
    began: float
    waited_s: float

    @property
    def sessions(self) -> list[Session]:
        """All sessions of the round."""
        return [row.session for row in self.prefill] + [row.session for row in self.verify]


@dataclass(slots=True, eq=False)
class _Settled:
    """A row whose tokens are committed and whose drafter is told; the rest is to be done."""

    session: Session
    result: RowOutcome
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    verified: VerifyRow | None = None
    missed: bool = False
    """Whether a proposal was wanted and none was there."""


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
        self._turn(now)
        rows = [self._row_state(session) for session in self._core.sessions.values()]
        if self._flying is not None:
            return plan_ahead(rows, self._flying.plan)
        return plan_round(rows, now, self._limits)

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
            outcome = self._engine.collect(flying.flight)
            rows = [
                self._settle_prefill(row, last, result)
                for row, last, result in zip(
                    flying.prefill, flying.finishing, outcome.prefill, strict=True
                )
            ]
            rows += [
                self._settle_verify(row, result)
                for row, result in zip(flying.verify, outcome.verify, strict=True)
            ]
            settled = [row for row in rows if row is not None]
            self.flush()
            if settled and all(row.session.link_id is not None for row in settled):
                time.sleep(GIVE_WAY_S)
            verified = [_verified(row) for row in settled if row.verified is not None]
            emitted = sum(map(self._follow_up, settled))
        except Exception as bug:
            self._fail(flying.sessions, bug)
            return
        total_s = self._report(flying, outcome, emitted)
        self._core.policy.observe_round(
            verified,
            seconds=total_s,
            nodes=sum(row.nodes for row in verified),
            prompts=bool(flying.prefill),
            now=self._clock(),
        )

    def check_device(self, bug: BaseException | None) -> None:
        """After a failure, `bug` if it is known: note whether the device is the reason."""
        if self.device_lost or self._engine.usable:
            return
        self.device_lost = True
        self._core.counters["device_losses"] += 1
        logger.critical("the device is lost", exc_info=bug)

    def _submit(self, plan: RoundPlan, began: float, waited_s: float) -> _InFlight:
        prefill = [
            PrefillRow(session=self._core.sessions[chunk.session_id], num_tokens=chunk.num_tokens)
            for chunk in plan.prefill
        ]
        verify = [self._verify_row(row) for row in plan.decode]
        # `last` is a question about the state before the round.
        finishing = [row.last for row in prefill]
        return _InFlight(
            plan=plan,
            prefill=prefill,
            verify=verify,
            finishing=finishing,
            flight=self._engine.submit(prefill, verify),
            began=began,
            waited_s=waited_s,
        )

    def _turn(self, now: float) -> None:
        """Pause and resume speculation where the policy has changed its mind."""
        policy = self._core.policy
        policy.set_load(len(self._core.sessions))
        if not policy.changed:
            return
        policy.changed = False
        for session in self._core.sessions.values():
            pauses = policy.pauses(session)
            if pauses == session.paused:
                continue
            if self._flying is not None and not session.own_draft:
                # What the drafter is told must not miss the round in flight: ask again then.
                policy.changed = True
            elif pauses:
                self._core.pause(session)
            else:
                self._core.resume(session, now)

    def _row_state(self, session: Session) -> RowState:
        proposal = None
        left = session.prefill_left
        if left == 0 and session.draft_wanted:
            proposal = self._core.inbox.peek(session.session_id, session.digest)
        awaits = proposal is None and session.awaits_proposal
        return RowState(
            session_id=session.session_id,
            prefill_left=left,
            nodes=None if proposal is None else len(proposal.tree),
            own_nodes=session.own_depth,
            awaits_proposal=awaits,
            since=session.since,
            proposal_at=session.proposal_at,
            patience_s=self._core.policy.patience(session) if awaits else 0.0,
            runs_ahead=self._runs_ahead(session),
            remaining=session.remaining,
        )

    def _may_stay_in_flight(self, flying: _InFlight) -> bool:
        # Prompts and proposals need the host after their round; so no command can come between.
        return not flying.prefill and all(
            row.session.ended or (row.proposal is None and self._runs_ahead(row.session))
            for row in flying.verify
        )

    def _runs_ahead(self, session: Session) -> bool:
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (session.paused and self._core.policy.pauses(session))
        return self._engine.run_ahead and alone and self._engine.can_run_ahead(session)

    def _verify_row(self, row: DecodeRow) -> VerifyRow:
        session = self._core.sessions[row.session_id]
        if row.missed:
            self._core.policy.missed(session)
            self._core.counters["patience_over"] += 1
        if not session.draft_wanted:
            return VerifyRow(session=session, own_depth=session.own_depth)
        proposal = self._core.inbox.take(session.session_id, session.digest)
        if proposal is None:
            return VerifyRow(session=session)
        draft = trim(proposal.tree, proposal.law, session.max_draft_depth)
        return VerifyRow(session=session, proposal=proposal, draft=draft)

    def _settle_prefill(self, row: PrefillRow, last: bool, result: RowOutcome) -> _Settled | None:
        """Commit the first token if the prompt is complete, tell the drafter."""
        session = row.session
        self._core.counters["prefill_tokens"] += row.num_tokens
        if session.ended:
            return None
        if not last:
            self._tell(session, result)
            return _Settled(session, result)
        return self._commit(session, result)

    def _settle_verify(self, row: VerifyRow, result: RowOutcome) -> _Settled | None:
        """Commit what stands, tell the drafter."""
        return None if row.session.ended else self._commit(row.session, result, row)

    def _commit(
        self, session: Session, result: RowOutcome, row: VerifyRow | None = None
    ) -> _Settled:
        assert result.acceptance is not None
        tokens, reason = cut_emission(
            result.acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
        )
        missed = row is not None and row.proposal is None and session.draft_wanted
        session.append(tokens, self._clock())
        session.round_id += int(row is not None)
        if reason is None:
            self._tell(session, result, row)
        return _Settled(session, result, tokens, reason, row, missed)

    def _follow_up(self, settled: _Settled) -> int:
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
        self._core.inbox.prune(session.session_id, digest=session.digest, prefix_len=session.length)
        return len(tokens)

    def _tell(self, session: Session, result: RowOutcome, row: VerifyRow | None = None) -> None:
        if session.link_id is None or session.paused:
            return
        nodes: tuple[int, ...] = ()
        digest = 0
        if row is not None and row.proposal is not None and row.draft is not None:
            assert result.acceptance is not None
            nodes = row.draft.original(result.acceptance.accepted_nodes)
            digest = row.proposal.prefix_digest
        verdict = self._core.handover.advance(
            session, result.features, accepted_nodes=nodes, proposal_digest=digest
        )
        self._core.tell(session, verdict)

    def _finish(self, session: Session) -> None:
        self._core.counters["finished"] += 1
        self._core.free(session)

    def _count(self, settled: _Settled, row: VerifyRow) -> None:
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
            paused=session.paused,
            decision=self._core.policy.decision(session),
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


def _verified(settled: _Settled) -> Verified:
    row, result = settled.verified, settled.result
    assert row is not None
    assert result.acceptance is not None
    nodes = result.drafted if row.draft is None else len(row.draft.tree)
    chain = row.draft is None or nodes < 2 or is_chain(row.draft.tree.parents)
    return Verified(
        session=settled.session,
        emitted=len(settled.tokens),
        nodes=nodes,
        depth=nodes if chain or row.draft is None else int(row.draft.depths.max()),
        accepted_len=len(result.acceptance.accepted_nodes),
        missed=settled.missed,
    )
