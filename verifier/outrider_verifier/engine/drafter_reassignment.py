"""A session goes to another drafter while it runs: nothing but who drafts for it changes."""

from __future__ import annotations

from dataclasses import replace

from outrider.ids import DrafterId
from outrider_verifier.exchange.session_announcer import Announcer
from outrider_verifier.planner.feature_retention import never_drafts
from outrider_verifier.planner.speculation_policy import Policy
from outrider_verifier.state.session import Session


def move(
    session: Session, drafter_id: DrafterId | None, drafters: Announcer, policy: Policy
) -> bool:
    """Let this drafter draft for the session from its present prefix on; whether it does. None:
    nobody is to, and it decodes plainly until it is moved again.

    A drafter must be attached and able to follow: where the features of before are not held any
    more, the session keeps the drafter that it has. A proposal that is there stays usable: it names
    its prefix, not its drafter; but not where nobody drafts any more, for then nothing follows the
    prefix.
    """
    if session.own_draft:
        return False
    if drafter_id is not None and not drafters.can_announce(session, drafter_id):
        if not never_drafts(session) or drafters.link_of(drafter_id) is None:
            return False
        # Nobody drafts for it, whoever would.
        session.spec = replace(session.spec, drafter_id=drafter_id)
        session.suspect, session.losses = False, 0
        policy.follow(session)
        return True
    if session.spec.drafter_id == drafter_id and session.link_id is not None:
        return True
    drafters.withdraw(session)
    if session.paused:
        # What it committed meanwhile was told to nobody.
        drafters.follow_alone(session)
    session.spec = replace(session.spec, drafter_id=drafter_id)
    session.suspect = session.paused = False
    session.losses = 0
    policy.follow(session)
    if drafter_id is None:
        drafters.abandon(session)
    else:
        drafters.announce(session)
    return True
