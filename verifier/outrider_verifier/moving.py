"""A session goes to another drafter while it runs: nothing but who drafts for it changes."""

from __future__ import annotations

from dataclasses import replace

from outrider.ids import DrafterId
from outrider_verifier.announcing import Announcer
from outrider_verifier.policy import Policy
from outrider_verifier.sessions import Session


def move(session: Session, drafter_id: DrafterId, drafters: Announcer, policy: Policy) -> bool:
    """Let this drafter draft for the session from its present prefix on; whether it does.

    It must be attached and able to follow: where the features of before are not held any more, the
    session keeps the drafter that it has. A proposal that is there stays usable: it names its
    prefix, not its drafter.
    """
    if session.own_draft or not drafters.can_announce(session, drafter_id):
        return False
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
    drafters.announce(session)
    return True
