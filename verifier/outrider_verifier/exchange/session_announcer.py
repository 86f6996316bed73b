"""Announces sessions to attached drafters, withdraws them, and sends their messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from outrider.ids import DrafterId
from outrider.wire.codec import encode_verdicts
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    EncodedMessage,
    PlanChange,
    SessionEnd,
    Verdicts,
    VerifierMessage,
)
from outrider_verifier.exchange.drafter_health import DrafterHealth, DrafterHealthRegistry
from outrider_verifier.exchange.verdict_builder import VerdictBatch, VerdictBuilder
from outrider_verifier.state.commands import ExchangeLink
from outrider_verifier.state.effects import Post, SendMessage
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED

_MAX_LOSSES = 3
"""How often a session that its drafter lost is announced to it again."""


class SessionAnnouncer:
    """Attached drafters by name, and the sessions announced to each.

    Engine thread only; the sessions belong to the caller.
    """

    def __init__(
        self,
        verdict_builder: VerdictBuilder,
        *,
        post: Post,
        sessions: Callable[[], Iterable[Session]],
        counters: Counter[str],
    ) -> None:
        """`sessions`: those being served."""
        self._verdict_builder = verdict_builder
        self._post = post
        self._sessions = sessions
        self._counters = counters
        self._begun: list[Session] = []
        """Sessions whose drafters have yet to hear what no round is going to tell of."""
        self._links: dict[DrafterId, ExchangeLink] = {}
        self._health_registry = DrafterHealthRegistry()
        self._on_link: dict[int, DrafterHealth] = {}
        """Of the drafters attached now, by link."""

    def link_of(self, drafter_id: DrafterId | None) -> ExchangeLink | None:
        """The connection of a drafter that is attached now."""
        return None if drafter_id is None else self._links.get(drafter_id)

    def attached_flag(self, session: Session) -> int:
        """What events say of a session's drafter: DRAFTER_ATTACHED, or 0."""
        return 0 if self.link_of(session.spec.drafter_id) is None else DRAFTER_ATTACHED

    def health_of_link(self, link_id: int | None) -> DrafterHealth | None:
        """How the drafter on a link behaves; None: the link is gone."""
        return None if link_id is None else self._on_link.get(link_id)

    def health_of_drafter(self, drafter_id: DrafterId) -> DrafterHealth | None:
        """The same of a drafter that is attached; any thread may ask."""
        link = self._links.get(drafter_id)
        return None if link is None else self._on_link.get(link.link_id)

    def record_device_drafts(self, drafter_id: DrafterId, rounds: int) -> None:
        """So many rounds found drafts of this drafter on the device."""
        health = self.health_of_drafter(drafter_id)
        if health is not None:
            health.record_device_drafts(time.monotonic(), rounds)

    def set_silent(self, link_id: int, *, silent: bool) -> None:
        """Let no session wait for the drafter on a link, or let each find out again."""
        for session in self._sessions():
            if session.link_id != link_id:
                continue
            session.has_stalled_drafter = session.has_stalled_drafter or silent
            if session.speculation_state is not None:
                session.speculation_state.wait.is_silent = silent

    def attach(self, link: ExchangeLink) -> None:
        """A drafter is ready: its sessions, from their present prefixes on."""
        self._counters["attached"] += 1
        self._links[link.drafter_id] = link
        drafter_health = self._on_link[link.link_id] = self._health_registry.get_health(
            link.drafter_id
        )
        drafter_health.record_attach()
        for session in self._sessions():
            if session.spec.drafter_id == link.drafter_id:
                self._verdict_builder.forget_session(session)
                if session.link_id is not None:
                    # What its predecessor still sends is no fault.
                    drafter_health.record_release()
                session.mark_withdrawn()
                self.announce(session)

    def detach(self, link_id: int) -> None:
        """A connection is gone."""
        for drafter_id, link in list(self._links.items()):
            if link.link_id == link_id:
                del self._links[drafter_id]
        self._on_link.pop(link_id, None)
        for session in self._sessions():
            if session.link_id == link_id:
                session.mark_withdrawn()
                self._verdict_builder.forget_session(session)

    def can_announce(self, session: Session, drafter_id: DrafterId) -> bool:
        """Whether a drafter is attached and could serve the session from now on."""
        link = self.link_of(drafter_id)
        return link is not None and self._verdict_builder.can_announce(session, link)

    def announce(self, session: Session) -> None:
        """Hand the session to its drafter if that is attached and can serve it; of one that decodes
        plainly it hears when it is to draft for it."""
        link = self.link_of(session.spec.drafter_id)
        if (
            session.is_speculation_off
            # Its drafts come between devices.
            or session.in_process_draft_length
            or link is None
            or not self._verdict_builder.can_announce(session, link)
        ):
            return
        session.mark_announced(link.link_id)
        # Nobody new waits for one that others miss.
        session.has_stalled_drafter = self._on_link[link.link_id].is_silent
        if session.speculation_state is not None:
            session.speculation_state.wait.is_silent = session.has_stalled_drafter
        for message in self._verdict_builder.start_session(session, link):
            # Before the next round is planned it may end, and others be given what it held.
            self._post(_tell(link.link_id, message).owned())
        self._on_link[link.link_id].record_requests(1)

    def reannounce(self, session: Session) -> None:
        """Begin anew with a session that its drafter lost, a few times."""
        self._counters["sessions_lost_by_drafters"] += 1
        losses = session.drafter_record.record_loss()
        self.withdraw(session)
        if losses <= _MAX_LOSSES:
            self.announce(session)

    def withdraw(self, session: Session) -> None:
        """End the session at its drafter, if it is announced to one."""
        if session.link_id is not None:
            self.send_message(session, SessionEnd(handle=session.handle))
            self._on_link[session.link_id].record_release()
            session.mark_withdrawn()
        self._verdict_builder.forget_session(session)

    def drop_drafter(self, session: Session) -> None:
        """Nobody drafts for the session from now on; it was withdrawn."""
        self._verdict_builder.follow_session(session)

    def advance_without_speculation(self, session: Session) -> None:
        """Take in what a paused session committed; no drafter is told."""
        if session.spec.drafter_id is not None:
            self._verdict_builder.advance_and_build(VerdictBatch.of_current([session], [None]))

    def send_plan(self, session: Session) -> None:
        """Say to its drafter how an announced session is to be drafted for now."""
        self.send_message(session, PlanChange(handle=session.handle, plan=session.drafter_plan))

    def queue_prefix(self, session: Session) -> None:
        """A session has begun with what others had computed."""
        self._begun.append(session)

    def send_queued_prefixes(self) -> None:
        """Say what sessions have begun with. It is much to copy: to be called once a round was
        submitted, and before any with these sessions is told of."""
        begun, self._begun = self._begun, []
        for session in begun:
            if session.link_id is not None and not (
                session.is_speculation_off or session.phase is ENDED
            ):
                for message in self._verdict_builder.build_catch_up(session):
                    self.send_message(session, message)

    def send_round(self, told: VerdictBatch) -> None:
        """Say to each drafter what a round committed of its sessions. Features are sent from where
        they lie, which must be written to only when what was posted has been handed over."""
        self.send_verdicts(self._verdict_builder.advance_and_build(told))

    def send_verdicts(self, verdicts_by_link: Sequence[tuple[int, Verdicts]]) -> None:
        """Send verdicts that were worked out; see `send_round`."""
        for link_id, verdicts in verdicts_by_link:
            self._on_link[link_id].record_requests(int(np.count_nonzero(verdicts.draft_wanted)))
            self._post(_tell(link_id, verdicts))

    def send_message(self, session: Session, message: VerifierMessage) -> None:
        """Send a message to the session's drafter."""
        assert session.link_id is not None, session.session_id
        self._post(_tell(session.link_id, message))


def _tell(link_id: int, message: VerifierMessage) -> SendMessage:
    """Verdicts are encoded by the thread that made them, which owns what their features lie in."""
    if isinstance(message, Verdicts):
        message = EncodedMessage(encode_verdicts(message))
    return SendMessage(link_id, message)
