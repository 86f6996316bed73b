"""What the planner's changes of mind do to the sessions; engine thread only."""

from __future__ import annotations

from outrider_verifier.engine.core import Core
from outrider_verifier.state.round_plan import RoundPlan
from outrider_verifier.state.session import Session


def turn(core: Core, now: float, *, flying: RoundPlan | None) -> None:
    """Before a round is planned, pause and resume speculation and look-ahead where the policy has
    changed its mind; `flying`: the round in flight."""
    policy = core.policy
    policy.begin_round(len(core.room.running), now)
    if not policy.changed:
        return
    policy.changed = False
    core.touched += 1
    under_way = set() if flying is None else set(flying.session_ids)
    for session in core.sessions.values():
        session.draft_limit = policy.limit(session)
        pauses = policy.pauses(session)
        if pauses == session.paused:
            pass
        elif session.link_id is not None and session.session_id in under_way:
            # What the drafter is told must not miss the round in flight: ask again then.
            policy.changed = True
        elif pauses:
            policy.turn(session, paused=True)
            session.covered = 0
            core.counters["speculation_paused"] += 1
        else:
            _resume(core, session, now)
        if not session.paused:
            _look_ahead(core, session)
        elif policy.lets_go(session):
            _let_go(core, session)


def _let_go(core: Core, session: Session) -> None:
    """Keep nothing any more that a drafter would need of a session that is paused."""
    core.policy.let_go(session)
    core.drafters.withdraw(session)
    if core.store is not None:
        core.store.close(session.handle)
    core.counters["lean_sessions"] += 1


def _look_ahead(core: Core, session: Session) -> None:
    """Have the session's drafter look ahead, or not, whatever round is in flight."""
    ahead = core.policy.looks_ahead(session)
    if ahead == session.ahead:
        return
    core.policy.turn_ahead(session, ahead=ahead)
    core.counters["look_ahead_begun" if ahead else "look_ahead_ended"] += 1
    if session.link_id is not None:
        core.drafters.tell_plan(session)


def _resume(core: Core, session: Session, now: float) -> None:
    """Let a paused session speculate again; no round with it is in flight that its drafter would
    have to hear of."""
    core.policy.turn(session, paused=False)
    core.counters["speculation_resumed"] += 1
    # Its drafter hears of the root now, so the wait for it begins now.
    session.since = now
    if session.link_id is not None and core.handover.can_catch_up(session):
        for message in core.handover.catch_up(session):
            core.drafters.tell(session, message)
        return
    core.drafters.withdraw(session)
    core.drafters.announce(session)
    if session.link_id is None:
        core.drafters.follow_alone(session)
