"""What the planner's changes of mind do to the sessions; engine thread only."""

from __future__ import annotations

from outrider_verifier.core import Core
from outrider_verifier.schedule import RoundPlan
from outrider_verifier.sessions import Session


def turn(core: Core, now: float, *, flying: RoundPlan | None) -> None:
    """Before a round is planned, pause and resume speculation where the policy has changed its
    mind; `flying`: the round in flight."""
    policy = core.policy
    policy.begin_round(core.num_sessions, now)
    if not policy.changed:
        return
    policy.changed = False
    under_way = set() if flying is None else set(flying.session_ids)
    for session in core.sessions.values():
        session.draft_limit = policy.limit(session)
        pauses = policy.pauses(session)
        if pauses == session.paused:
            continue
        if session.link_id is not None and session.session_id in under_way:
            # What the drafter is told must not miss the round in flight: ask again then.
            policy.changed = True
        elif pauses:
            policy.turn(session, paused=True)
            core.counters["speculation_paused"] += 1
        else:
            _resume(core, session, now)


def _resume(core: Core, session: Session, now: float) -> None:
    """Let a paused session speculate again; no round with it is in flight that its drafter would
    have to hear of."""
    core.policy.turn(session, paused=False)
    core.counters["speculation_resumed"] += 1
    if session.link_id is None or not core.handover.can_catch_up(session):
        core.drafters.withdraw(session)
        core.drafters.follow_alone(session)
        return
    # Its drafter hears of the root now, so the wait for it begins now.
    session.since = now
    for message in core.handover.catch_up(session):
        core.drafters.tell(session, message)
