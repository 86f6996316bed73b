"""Moves a running session to another drafter, or to none; its text and KV stay as they are."""

from __future__ import annotations

from outrider.ids import DrafterId
from outrider_verifier.exchange.session_announcer import SessionAnnouncer
from outrider_verifier.planner.speculation_policy import SpeculationPolicy, can_never_draft
from outrider_verifier.state.session import Session


def move_session(
    session: Session,
    drafter_id: DrafterId | None,
    drafters: SessionAnnouncer,
    policy: SpeculationPolicy,
) -> bool:
    """Assign `drafter_id` to the session, starting at its current prefix; None removes the drafter.
    Return whether the assignment is in force.

    The drafter must be attached. If the session's features were dropped, the session keeps its old
    drafter. A proposal that has already arrived stays usable, unless `drafter_id` is None.
    """
    if session.in_process_draft_length:
        return False
    if drafter_id is not None and not drafters.can_announce(session, drafter_id):
        if not can_never_draft(session) or drafters.link_of(drafter_id) is None:
            return False
        # No drafter can draft for the session, so only the assignment is recorded.
        session.assign_drafter(drafter_id)
        session.has_stalled_drafter = False
        policy.update_session(session)
        return True
    if session.spec.drafter_id == drafter_id and session.link_id is not None:
        return True
    drafters.withdraw(session)
    if session.is_speculation_off:
        # The drafter did not receive the tokens committed meanwhile.
        drafters.advance_without_speculation(session)
    session.assign_drafter(drafter_id)
    session.has_stalled_drafter = session.is_speculation_off = False
    policy.update_session(session)
    if drafter_id is None:
        drafters.drop_drafter(session)
    else:
        drafters.announce(session)
    return True
