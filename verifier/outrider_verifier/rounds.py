"""Rounds over the core's sessions: plan, run, settle each row (engine thread only)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outrider.errors import InternalError
from outrider.spec.accounting import add_round
from outrider_verifier.core import Core
from outrider_verifier.effects import RoundReport
from outrider_verifier.engine import (
    PrefillRow,
    RoundEngine,
    RoundOutcome,
    RowOutcome,
    VerifyRow,
)
from outrider_verifier.rows import cut_emission, trim
from outrider_verifier.schedule import DecodeRow, Limits, RoundPlan, RowState, plan_round
from outrider_verifier.sessions import Session

logger = logging.getLogger(__name__)


class Rounds:
    """Runs one round at a time on behalf of the loop."""

    def __init__(
        self,
        core: Core,
        engine: RoundEngine,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._engine = engine
        self._limits = limits
        self._clock = clock

    def enter_thread(self) -> None:
        """To be called once by the thread that will run the rounds."""
        self._engine.enter_thread()

    def plan(self, now: float) -> RoundPlan:
        """What to do now."""
        rows = [self._row_state(session) for session in self._core.sessions.values()]
        return plan_round(rows, now, self._limits)

    def run(self, plan: RoundPlan, *, waited_s: float = 0.0, spent_s: float = 0.0) -> None:
        """Run a round; an exception inside it fails the sessions of this round only.

        `spent_s` is what taking commands and planning cost; it counts as part of the round.
        """
        began = time.perf_counter() - spent_s
        prefill = [
            PrefillRow(session=self._core.sessions[chunk.session_id], num_tokens=chunk.num_tokens)
            for chunk in plan.prefill
        ]
        verify: list[VerifyRow] = []
        try:
            verify.extend(self._verify_row(row) for row in plan.decode)
            # `last` is a question about the state before the round.
            finishing = [row.last for row in prefill]
            outcome = self._engine.run(prefill, verify)
            emitted = 0
            for row, last, result in zip(prefill, finishing, outcome.prefill, strict=True):
                emitted += self._settle_prefill(row, last, result)
            for verified, result in zip(verify, outcome.verify, strict=True):
                emitted += self._settle_verify(verified, result)
        except Exception as bug:
            self._fail(plan, bug)
            return
        drafted_s = max((row.proposal.draft_us for row in verify if row.proposal), default=0) / 1e6
        total_s = time.perf_counter() - began
        self._report(plan, outcome, emitted, total_s, waited_s, min(drafted_s, waited_s))

    def _row_state(self, session: Session) -> RowState:
        proposal = None
        left = session.prefill_left
        if left == 0 and session.draft_wanted:
            proposal = self._core.inbox.peek(session.session_id, session.digest)
        return RowState(
            session_id=session.session_id,
            prefill_left=left,
            nodes=None if proposal is None else len(proposal.tree),
            awaits_proposal=session.awaits_proposal,
            since=session.since,
            proposal_at=session.proposal_at,
            patience_s=session.plan.patience_ms / 1000.0,
        )

    def _verify_row(self, row: DecodeRow) -> VerifyRow:
        session = self._core.sessions[row.session_id]
        if row.missed:
            session.suspect = True
            self._core.counters["patience_over"] += 1
        if not session.draft_wanted:
            return VerifyRow(session=session)
        proposal = self._core.inbox.take(session.session_id, session.digest)
        if proposal is None:
            return VerifyRow(session=session)
        draft = trim(proposal.tree, proposal.law, session.max_draft_depth)
        return VerifyRow(session=session, proposal=proposal, draft=draft)

    def _settle_prefill(self, row: PrefillRow, last: bool, result: RowOutcome) -> int:
        """Keep features, emit the first token if the prompt is complete, tell the drafter."""
        session = row.session
        self._core.counters["prefill_tokens"] += row.num_tokens
        if self._core.store is not None and result.features is not None:
            self._core.store.append(session.session_id, result.features)
        if not last:
            self._tell(session, result)
            return 0
        assert result.acceptance is not None
        tokens, reason = cut_emission(
            result.acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
        )
        session.append(tokens, self._clock())
        self._core.emit(session, tokens, reason)
        if reason is not None:
            self._finish(session)
        else:
            self._tell(session, result)
        return len(tokens)

    def _settle_verify(self, row: VerifyRow, result: RowOutcome) -> int:
        """Count the round, emit its tokens, tell the drafter or finish the session."""
        session, acceptance = row.session, result.acceptance
        assert acceptance is not None
        fallback = row.proposal is None and session.draft_wanted
        tokens, reason = cut_emission(
            acceptance.tokens, stop_ids=session.stop_ids, remaining=session.remaining
        )
        self._count(row, len(acceptance.accepted_nodes), fallback)
        session.stats = add_round(
            session.stats,
            proposed=0 if row.draft is None else len(row.draft.tree),
            accepted_len=min(len(acceptance.accepted_nodes), len(tokens)),
            emitted=len(tokens),
            fallback=fallback,
            target_only=acceptance.used_target_only_fallback,
        )
        session.append(tokens, self._clock())
        session.round_id += 1
        self._core.emit(session, tokens, reason)
        if reason is not None:
            self._finish(session)
            return len(tokens)
        if self._core.store is not None and result.features is not None:
            self._core.store.append(session.session_id, result.features)
        self._core.inbox.prune(session.session_id, digest=session.digest, prefix_len=session.length)
        self._tell(session, result, row)
        return len(tokens)

    def _tell(self, session: Session, result: RowOutcome, row: VerifyRow | None = None) -> None:
        if session.link_id is None:
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

    def _count(self, row: VerifyRow, accepted_len: int, fallback: bool) -> None:
        counters = self._core.counters
        counters["fallback_rounds"] += int(fallback)
        counters["accepted_tokens"] += accepted_len
        if row.draft is not None:
            counters["proposals_used"] += 1
            counters["proposed_tokens"] += len(row.draft.tree)

    def _fail(self, plan: RoundPlan, bug: Exception) -> None:
        logger.exception("round failed", extra={"sessions": len(plan.prefill) + len(plan.decode)})
        self._core.counters["failed_rounds"] += 1
        error = InternalError(
            f"the round failed: {type(bug).__name__}: {bug}", reason="ROUND_FAILED"
        )
        ids = [chunk.session_id for chunk in plan.prefill] + [row.session_id for row in plan.decode]
        for session_id in ids:
            session = self._core.sessions.get(session_id)
            if session is not None:
                self._core.fail(session, error)

    def _report(
        self,
        plan: RoundPlan,
        outcome: RoundOutcome,
        emitted: int,
        total_s: float,
        waited_s: float,
        drafted_s: float,
    ) -> None:
        self._core.counters["rounds"] += 1
        self._core.counters["emitted_tokens"] += emitted
        self._core.post(
            RoundReport(
                total_s=total_s,
                forward_s=outcome.forward_s,
                accept_s=outcome.accept_s,
                project_s=outcome.project_s,
                waited_s=waited_s,
                drafted_s=drafted_s,
                rows=outcome.rows,
                verify_rows=len(plan.decode),
                prefill_tokens=sum(chunk.num_tokens for chunk in plan.prefill),
                emitted=emitted,
            )
        )
