"""What the planner's changes of mind do to the sessions; engine thread only."""

from __future__ import annotations

from outrider_verifier.core import Core


def turn(core: Core, now: float, *, flying: bool) -> None:
    """Before a round is planned, pause and resume speculation where the policy has changed its
    mind; `flying`: whether a round is in flight."""
    policy = core.policy
    policy.begin_round(core.num_sessions, now)
    if not policy.changed:
        return
    policy.changed = False
    for session in core.sessions.values():
        session.draft_limit = policy.limit(session)
        pauses = policy.pauses(session)
        if pauses == session.paused:
            continue
        if flying and session.link_id is not None:
            # What the drafter is told must not miss the round in flight: ask again then.
            policy.changed = True
        elif pauses:
            core.pause(session)
        else:
            core.resume(session, now)
