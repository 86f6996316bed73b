"""What the schedule must know of the sessions that run."""

from __future__ import annotations

from outrider_verifier.core import Core
from outrider_verifier.runner import RoundRunner
from outrider_verifier.schedule import RowState
from outrider_verifier.sessions import Session


class RowStates:
    """Looks at a core's sessions, some microseconds each."""

    def __init__(self, core: Core, engine: RoundRunner) -> None:
        self._core, self._engine = core, engine

    def all(self) -> list[RowState]:
        """Of all sessions that run."""
        sessions = list(self._core.room.running.values())
        held = self._core.inbox.nodes([session.handle for session in sessions])
        return list(map(self.of, sessions, held))

    def of(self, session: Session, held: int) -> RowState:
        """Of one; `held`: nodes of its proposal, -1 if there is none."""
        spec, left, remaining = session.spec, session.prefill_left, session.remaining
        if session.paused:
            return RowState(
                spec.session_id,
                left,
                None,
                session.since,
                runs_ahead=self.runs_ahead(session),
                remaining=remaining,
                priority=spec.priority,
            )
        # What `draft_wanted` says, with the budget at hand.
        wanted = remaining > 1 and session.draft_limit > 0 and session.wishes_drafts
        if held >= 0 and left == 0 and wanted:
            priority = spec.priority
            return RowState(
                spec.session_id, 0, held, session.since, session.proposal_at, priority=priority
            )
        awaits = session.awaits_proposal
        return RowState(
            spec.session_id,
            left,
            None,
            session.since,
            own_nodes=session.own_depth if session.own_draft else 0,
            awaits_proposal=awaits,
            patience_s=self._core.policy.patience(session) if awaits else 0.0,
            runs_ahead=self.runs_ahead(session),
            remaining=remaining,
            priority=spec.priority,
        )

    def runs_ahead(self, session: Session) -> bool:
        """Whether the session's next round may be submitted before the one in flight is settled."""
        # A drafter that is told of every round could never catch up with one that runs ahead.
        alone = session.link_id is None or (session.paused and self._core.policy.pauses(session))
        # What a grammar allows next, the host finds out from what stands.
        return self._engine.run_ahead and alone and session.constraint is None
