"""Which sessions are announced to which attached drafter, and what is said to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from outrider.ids import DrafterId
from outrider.wire.codec import encode_verdicts
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    Encoded,
    PlanChange,
    SessionEnd,
    Verdicts,
    VerifierMessage,
)
from outrider_verifier.exchange.drafter_health import Conduct, Conducts
from outrider_verifier.exchange.verdict_builder import Handover, Told
from outrider_verifier.state.commands import Link
from outrider_verifier.state.effects import Post, Tell
from outrider_verifier.state.session import Session

_MOST_LOSSES = 3
"""How often a session that its drafter lost is announced to it again."""


class Announcer:
    """Attached drafters by name; engine thread only. Sessions are the caller's."""

    def __init__(
        self,
        handover: Handover,
        *,
        post: Post,
        sessions: Callable[[], Iterable[Session]],
        counters: Counter[str],
    ) -> None:
        """`sessions`: those being served."""
        self._handover = handover
        self._post = post
        self._sessions = sessions
        self._counters = counters
        self._begun: list[Session] = []
        """Sessions whose drafters have yet to hear what no round is going to tell of."""
        self._links: dict[DrafterId, Link] = {}
        self._conducts = Conducts()
        self._on_link: dict[int, Conduct] = {}
        """Of the drafters attached now, by link."""

    def link_of(self, drafter_id: DrafterId | None) -> Link | None:
        """The connection of a drafter that is attached now."""
        return None if drafter_id is None else self._links.get(drafter_id)

    def attached_flag(self, session: Session) -> int:
        """What events say of a session's drafter: DRAFTER_ATTACHED, or 0."""
        return 0 if self.link_of(session.spec.drafter_id) is None else DRAFTER_ATTACHED

    def conduct_on(self, link_id: int | None) -> Conduct | None:
        """How the drafter on a link behaves; None: the link is gone."""
        return None if link_id is None else self._on_link.get(link_id)

    def conduct_of(self, drafter_id: DrafterId) -> Conduct | None:
        """The same of a drafter that is attached; any thread may ask."""
        link = self._links.get(drafter_id)
        return None if link is None else self._on_link.get(link.link_id)

    def turn_silent(self, link_id: int, *, silent: bool) -> None:
        """Let no session wait for the drafter on a link, or let each find out again."""
        for session in self._sessions():
            if session.link_id != link_id:
                continue
            session.suspect = session.suspect or silent
            if session.pace is not None:
                session.pace.silent = silent

    def attach(self, link: Link) -> None:
        """A drafter is ready: its sessions, from their present prefixes on."""
        self._counters["attached"] += 1
        self._links[link.drafter_id] = link
        conduct = self._on_link[link.link_id] = self._conducts.of(link.drafter_id)
        conduct.attached()
        for session in self._sessions():
            if session.spec.drafter_id == link.drafter_id:
                self._handover.forget(session)
                if session.link_id is not None:
                    # What its predecessor still sends is no fault.
                    conduct.released()
                session.link_id = None
                self.announce(session)

    def detach(self, link_id: int) -> None:
        """A connection is gone."""
        for drafter_id, link in list(self._links.items()):
            if link.link_id == link_id:
                del self._links[drafter_id]
        self._on_link.pop(link_id, None)
        for session in self._sessions():
            if session.link_id == link_id:
                session.link_id = None
                self._handover.forget(session)

    def can_announce(self, session: Session, drafter_id: DrafterId) -> bool:
        """Whether a drafter is attached and could serve the session from now on."""
        link = self.link_of(drafter_id)
        return link is not None and self._handover.can_announce(session, link)

    def announce(self, session: Session) -> None:
        """Hand the session to its drafter if that is attached and can serve it; of one that decodes
        plainly it hears when it is to draft for it."""
        link = self.link_of(session.spec.drafter_id)
        if session.paused or link is None or not self._handover.can_announce(session, link):
            return
        session.link_id = link.link_id
        # Nobody new waits for one that others miss.
        session.suspect = self._on_link[link.link_id].silent
        if session.pace is not None:
            session.pace.silent = session.suspect
        for message in self._handover.announce(session, link):
            # Before the next round is planned it may end, and others be given what it held.
            self._post(_tell(link.link_id, message).owned())
        self._on_link[link.link_id].asked(1)

    def announce_again(self, session: Session) -> None:
        """Begin anew with a session that its drafter lost, a few times."""
        self._counters["sessions_lost_by_drafters"] += 1
        session.losses += 1
        self.withdraw(session)
        if session.losses <= _MOST_LOSSES:
            self.announce(session)

    def withdraw(self, session: Session) -> None:
        """End the session at its drafter, if it is announced to one."""
        if session.link_id is not None:
            self.tell(session, SessionEnd(handle=session.handle))
            self._on_link[session.link_id].released()
            session.link_id = None
        self._handover.forget(session)

    def abandon(self, session: Session) -> None:
        """Nobody drafts for the session from now on; it was withdrawn."""
        self._handover.open(session)

    def follow_alone(self, session: Session) -> None:
        """Take in what a paused session committed; no drafter is told."""
        if session.spec.drafter_id is not None:
            self._handover.advance(Told.present([session], [None]))

    def tell_plan(self, session: Session) -> None:
        """Say to its drafter how an announced session is to be drafted for now."""
        self.tell(session, PlanChange(handle=session.handle, plan=session.drafter_plan))

    def begun(self, session: Session) -> None:
        """A session has begun with what others had computed."""
        self._begun.append(session)

    def tell_begun(self) -> None:
        """Say what sessions have begun with. It is much to copy: to be called once a round was
        submitted, and before any with these sessions is told of."""
        begun, self._begun = self._begun, []
        for session in begun:
            if session.link_id is not None and not (session.paused or session.ended):
                for message in self._handover.catch_up(session):
                    self.tell(session, message)

    def tell_round(self, told: Told) -> None:
        """Say to each drafter what a round committed of its sessions. Features are sent from where
        they lie, which must be written to only when what was posted has been handed over."""
        self.say(self._handover.advance(told))

    def say(self, verdicts_by_link: Sequence[tuple[int, Verdicts]]) -> None:
        """Send verdicts that were worked out; see `tell_round`."""
        for link_id, verdicts in verdicts_by_link:
            self._on_link[link_id].asked(int(np.count_nonzero(verdicts.draft_wanted)))
            self._post(_tell(link_id, verdicts))

    def tell(self, session: Session, message: VerifierMessage) -> None:
        """Send a message to the session's drafter."""
        assert session.link_id is not None, session.session_id
        self._post(_tell(session.link_id, message))


def _tell(link_id: int, message: VerifierMessage) -> Tell:
    """Verdicts are encoded by the thread that made them, which owns what their features lie in."""
    if isinstance(message, Verdicts):
        message = Encoded(encode_verdicts(message))
    return Tell(link_id, message)
