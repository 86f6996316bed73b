"""DraftRecovery starts or restores drafts by device exchange for running sessions.

A session lacks these drafts if its drafter was lost, if it began before its drafter could exchange,
if its KV was swapped (draft KV is not copied), or if the drafter refused to draft for it. Used on
the engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator

from outrider.ids import SessionId
from outrider_verifier.kv.block_manager import BlockManager
from outrider_verifier.model_runner.interface import ModelRunner
from outrider_verifier.planner.draft_recovery import (
    MAX_RECOMPUTING,
    MAX_UNDRAFTED_ROUNDS,
    UndraftedSession,
    recovery_order,
)
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED, SWAPPED


class DraftRecovery:
    """Recomputes the draft KV of sessions without drafts, a few sessions at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        *,
        has_remote_drafts: Callable[[Session], bool],
        begin_drafts: Callable[[Session], None],
        counters: Counter[str],
    ) -> None:
        """Create a recovery with no queued sessions. `has_remote_drafts` returns whether a drafter
        can draft for the given session by device exchange now. `begin_drafts` switches the given
        session to drafts by device exchange, unless the planner turns its speculation off."""
        self._runner, self._block_manager = runner, block_manager
        self._has_remote_drafts, self._begin_drafts = has_remote_drafts, begin_drafts
        self._counters = counters
        self.undrafted: dict[SessionId, Session] = {}
        """Queued sessions by id: those to check before the next round. If it is empty,
        `recover_drafts` does nothing."""
        self._refused: set[SessionId] = set()
        """Sessions without drafts although their drafter should have their draft KV."""

    def add_session(self, session: Session) -> None:
        """Queue a session. Before the next round, `recover_drafts` checks whether it lacks
        drafts."""
        self.undrafted[session.session_id] = session

    def record_undrafted_round(self, session: Session) -> None:
        """Record that a round of the session had no draft. A drafter that is only late catches up,
        but a drafter that has refused the session sends no more drafts for it. So after
        `MAX_UNDRAFTED_ROUNDS` such rounds in a row the session is queued for recovery."""
        rounds = session.drafter_record.record_undrafted_round(session.round_id)
        if session.spec.drafter_id is not None and rounds >= MAX_UNDRAFTED_ROUNDS:
            session.drafter_record.reset_undrafted_rounds()
            self._refused.add(session.session_id)
            self.add_session(session)

    def clear(self) -> None:
        """Forget all queued sessions. Call this when no drafter with device exchange is attached
        any more."""
        self.undrafted.clear()
        self._refused.clear()

    def recover_drafts(
        self, now: float, *, in_flight: Container[SessionId], round_s: float
    ) -> bool:
        """Before a round is planned, make a few sessions recompute their draft KV. Return False if
        the round in flight must be finished first, because a chosen session is in `in_flight`.
        `round_s` is the time of a round in seconds (see `recovery_order`)."""
        manager, running = self._block_manager, self._block_manager.running.values()
        recomputing = sum([session.emitted > 0 and session.prefill_left > 0 for session in running])
        # A session that gains too little now gains even less later, so it is dropped.
        order = recovery_order(self._lacking(), round_s=round_s)
        self.undrafted = {name: self.undrafted[name] for name in order}
        self._refused &= self.undrafted.keys()
        chosen = [each for each in self.undrafted.values() if manager.can_recompute(each)]
        chosen = chosen[: max(0, MAX_RECOMPUTING - recomputing)]
        if any([session.session_id in in_flight for session in chosen]):
            manager.pressed = True
            return False
        for session in chosen:
            if not manager.can_recompute(session):
                # The session before this one took the blocks.
                continue
            del self.undrafted[session.session_id]
            self._refused.discard(session.session_id)
            self._begin(session)
            if session.in_process_draft_length:
                self._counters["draft_recoveries"] += 1
                manager.recompute_session(session, now)
        return True

    def _lacking(self) -> Iterator[UndraftedSession]:
        """Yield the running sessions that lack drafts. Waiting sessions get drafts when they are
        admitted; swapped ones are queued again once they run."""
        for session in self.undrafted.values():
            if session.phase is ENDED or not self._has_remote_drafts(session):
                continue
            if session.is_waiting:
                if session.phase is not SWAPPED:
                    self._begin(session)
            elif session.session_id in self._refused or not (
                session.in_process_draft_length and self._runner.has_draft_kv(session)
            ):
                yield UndraftedSession(
                    session.session_id,
                    session.opened_at,
                    self._block_manager.expected_tokens_left(session),
                    self._block_manager.recompute_s(session),
                )

    def _begin(self, session: Session) -> None:
        if not session.in_process_draft_length:
            self._begin_drafts(session)
