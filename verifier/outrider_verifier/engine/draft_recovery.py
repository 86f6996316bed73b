"""DraftRecovery: gives sessions drafts between devices that have none, or have them no more.

A session lacks them whose drafter was lost, that began before its drafter could exchange, whose
KV was swapped, for the draft's is not copied, or whose rows the drafter has refused. Engine thread
only.
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
    """Sessions whose draft KV is to be computed once more, a few at a time."""

    def __init__(
        self,
        runner: ModelRunner,
        block_manager: BlockManager,
        *,
        has_remote_drafts: Callable[[Session], bool],
        begin_drafts: Callable[[Session], None],
        counters: Counter[str],
    ) -> None:
        """`has_remote_drafts`: whether a session is one of those that a drafter drafts for between
        devices now. `begin_drafts`: has it draft for a session, unless the planner is against
        it."""
        self._runner, self._block_manager = runner, block_manager
        self._has_remote_drafts, self._begin_drafts = has_remote_drafts, begin_drafts
        self._counters = counters
        self.undrafted: dict[SessionId, Session] = {}
        """Sessions to look at before the next round; without any, `recover_drafts` does nothing."""
        self._refused: set[SessionId] = set()
        """Those whose drafter does not draft for them, though it should have their draft KV."""

    def add_session(self, session: Session) -> None:
        """Look at a session before the next round; it need not lack anything."""
        self.undrafted[session.session_id] = session

    def record_undrafted_round(self, session: Session) -> None:
        """A round of the session found no draft. Late drafters catch up; one that has refused a row
        of a session has none for it any more."""
        rounds = session.drafter_record.record_undrafted_round(session.round_id)
        if session.spec.drafter_id is not None and rounds >= MAX_UNDRAFTED_ROUNDS:
            session.drafter_record.reset_undrafted_rounds()
            self._refused.add(session.session_id)
            self.add_session(session)

    def clear(self) -> None:
        """Nobody drafts between devices any more."""
        self.undrafted.clear()
        self._refused.clear()

    def recover_drafts(
        self, now: float, *, in_flight: Container[SessionId], round_s: float
    ) -> bool:
        """Before a round is planned, have a few sessions prefill once more. False: the round in
        flight, with the sessions `in_flight`, is to be settled first. `round_s`: see
        `recovery_order`."""
        manager, running = self._block_manager, self._block_manager.running.values()
        recomputing = sum([session.emitted > 0 and session.prefill_left > 0 for session in running])
        # A session that gains too little gains even less later: it is looked at no more.
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
                # The one before it took the blocks.
                continue
            del self.undrafted[session.session_id]
            self._refused.discard(session.session_id)
            self._begin(session)
            if session.in_process_draft_length:
                self._counters["draft_recoveries"] += 1
                manager.recompute_session(session, now)
        return True

    def _lacking(self) -> Iterator[UndraftedSession]:
        """Running sessions that lack drafts. Waiting ones get them with their KV; those that were
        swapped come here again once they run."""
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
