"""Pauses and resumes speculation and look-ahead of sessions as the policy decides.

Engine thread only.
"""

from __future__ import annotations

from outrider_verifier.engine.core import EngineCore
from outrider_verifier.state.round_plan import RoundPlan
from outrider_verifier.state.session import Session


def apply_speculation_changes(core: EngineCore, now: float, *, in_flight: RoundPlan | None) -> None:
    """Before a round is planned, pause and resume speculation and look-ahead where the policy has
    changed its mind; `in_flight`: the round in flight."""
    policy = core.policy
    policy.begin_round(len(core.block_manager.running), now)
    if not policy.changed:
        return
    policy.changed = False
    core.touched += 1
    under_way = set() if in_flight is None else set(in_flight.session_ids)
    for session in core.sessions.values():
        session.draft_limit = policy.draft_limit(session)
        pauses = policy.should_pause(session)
        if pauses == session.is_speculation_off:
            pass
        elif session.link_id is not None and session.session_id in under_way:
            # What the drafter is told must not miss the round in flight: ask again then.
            policy.changed = True
        elif pauses:
            policy.record_pause(session, paused=True)
            session.recheck_blocks()
            core.counters["speculation_paused"] += 1
        else:
            _resume(core, session, now)
        if not session.is_speculation_off:
            _look_ahead(core, session)


def _look_ahead(core: EngineCore, session: Session) -> None:
    """Have the session's drafter look ahead, or not, whatever round is in flight."""
    ahead = core.policy.should_look_ahead(session)
    if ahead == session.is_look_ahead_on:
        return
    core.policy.record_look_ahead(session, ahead=ahead)
    core.counters["look_ahead_started" if ahead else "look_ahead_ended"] += 1
    if session.link_id is not None:
        core.drafters.send_plan(session)


def _resume(core: EngineCore, session: Session, now: float) -> None:
    """Let a paused session speculate again; no round with it is in flight that its drafter would
    have to hear of."""
    core.policy.record_pause(session, paused=False)
    core.counters["speculation_resumed"] += 1
    # Its drafter hears of the root now, so the wait for it begins now.
    session.root_known_at = now
    if session.link_id is not None and core.verdict_builder.can_catch_up(session):
        for message in core.verdict_builder.build_catch_up(session):
            core.drafters.send_message(session, message)
        return
    core.drafters.withdraw(session)
    core.drafters.announce(session)
    if session.link_id is None:
        core.drafters.advance_without_speculation(session)
