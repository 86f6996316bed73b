"""Announces sessions to attached drafters, withdraws sessions, and sends messages to drafters."""

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
"""Maximum number of times that a session is announced again to a drafter that lost it."""


class SessionAnnouncer:
    """Keeps the attached drafters, announces sessions to them, and sends them messages about these
    sessions.

    Used on the engine thread only, except methods documented as thread-safe. It does not own the
    sessions: the caller passes them.
    """

    def __init__(
        self,
        verdict_builder: VerdictBuilder,
        *,
        post: Post,
        sessions: Callable[[], Iterable[Session]],
        counters: Counter[str],
    ) -> None:
        """Create an announcer without drafters. `sessions` returns the sessions being served."""
        self._verdict_builder = verdict_builder
        self._post = post
        self._sessions = sessions
        self._counters = counters
        self._begun: list[Session] = []
        """Sessions whose reused prefixes must still be sent, because no round covers them."""
        self._links: dict[DrafterId, ExchangeLink] = {}
        self._health_registry = DrafterHealthRegistry()
        self._on_link: dict[int, DrafterHealth] = {}
        """Health of the attached drafters by link id."""

    def link_of(self, drafter_id: DrafterId | None) -> ExchangeLink | None:
        """Return the link of a drafter, or None if the drafter is not attached."""
        return None if drafter_id is None else self._links.get(drafter_id)

    def attached_flag(self, session: Session) -> int:
        """Return the event flag DRAFTER_ATTACHED if the session's drafter is attached, else 0."""
        return 0 if self.link_of(session.spec.drafter_id) is None else DRAFTER_ATTACHED

    def health_of_link(self, link_id: int | None) -> DrafterHealth | None:
        """Return the health of the drafter on a link, or None if the link is gone."""
        return None if link_id is None else self._on_link.get(link_id)

    def health_of_drafter(self, drafter_id: DrafterId) -> DrafterHealth | None:
        """Return the health of a drafter, or None if it is not attached. Thread-safe."""
        link = self._links.get(drafter_id)
        return None if link is None else self._on_link.get(link.link_id)

    def record_device_drafts(self, drafter_id: DrafterId, rounds: int) -> None:
        """Record that `rounds` rounds found drafts of this drafter in device memory."""
        health = self.health_of_drafter(drafter_id)
        if health is not None:
            health.record_device_drafts(time.monotonic(), rounds)

    def set_silent(self, link_id: int, *, silent: bool) -> None:
        """Mark the drafter on a link as silent or not silent in all its sessions.

        Sessions do not wait for a silent drafter.
        """
        for session in self._sessions():
            if session.link_id != link_id:
                continue
            session.has_stalled_drafter = session.has_stalled_drafter or silent
            if session.speculation_state is not None:
                session.speculation_state.wait.is_silent = silent

    def attach(self, link: ExchangeLink) -> None:
        """Register a drafter that is ready to draft, and announce to it the sessions that are
        assigned to it, with their current prefixes."""
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
                    # Drafts that the previous connection still sends are no fault of the drafter.
                    drafter_health.record_release()
                session.mark_withdrawn()
                self.announce(session)

    def detach(self, link_id: int) -> None:
        """Remove a link that was closed, and withdraw its sessions without a message."""
        for drafter_id, link in list(self._links.items()):
            if link.link_id == link_id:
                del self._links[drafter_id]
        self._on_link.pop(link_id, None)
        for session in self._sessions():
            if session.link_id == link_id:
                session.mark_withdrawn()
                self._verdict_builder.forget_session(session)

    def can_announce(self, session: Session, drafter_id: DrafterId) -> bool:
        """Return whether a drafter is attached and could serve the session from now on."""
        link = self.link_of(drafter_id)
        return link is not None and self._verdict_builder.can_announce(session, link)

    def announce(self, session: Session) -> None:
        """Announce the session to its drafter if the drafter is attached and can serve the session.

        A session with speculation off or with in-process drafts is not announced.
        """
        link = self.link_of(session.spec.drafter_id)
        if (
            session.is_speculation_off
            # The drafts of these sessions are not sent over the link.
            or session.in_process_draft_length
            or link is None
            or not self._verdict_builder.can_announce(session, link)
        ):
            return
        session.mark_announced(link.link_id)
        # A new session does not wait for a drafter that is already silent.
        session.has_stalled_drafter = self._on_link[link.link_id].is_silent
        if session.speculation_state is not None:
            session.speculation_state.wait.is_silent = session.has_stalled_drafter
        for message in self._verdict_builder.start_session(session, link):
            # The session may end before the next round, and other sessions may reuse its memory.
            self._post(_tell(link.link_id, message).owned())
        self._on_link[link.link_id].record_requests(1)

    def reannounce(self, session: Session) -> None:
        """Withdraw a session that its drafter has lost, and announce it again. A session that was
        lost more than three times is no longer announced."""
        self._counters["sessions_lost_by_drafters"] += 1
        losses = session.drafter_record.record_loss()
        self.withdraw(session)
        if losses <= _MAX_LOSSES:
            self.announce(session)

    def withdraw(self, session: Session) -> None:
        """End the session at its drafter, if the session is announced to a drafter."""
        if session.link_id is not None:
            self.send_message(session, SessionEnd(handle=session.handle))
            self._on_link[session.link_id].record_release()
            session.mark_withdrawn()
        self._verdict_builder.forget_session(session)

    def drop_drafter(self, session: Session) -> None:
        """Drop the proposals and the tracked prefix of a withdrawn session that no longer has a
        drafter."""
        self._verdict_builder.follow_session(session)

    def advance_without_speculation(self, session: Session) -> None:
        """Advance the tracked prefix of a session by the tokens that it committed while speculation
        was off. Send no message."""
        if session.spec.drafter_id is not None:
            self._verdict_builder.advance_and_build(VerdictBatch.of_current([session], [None]))

    def send_plan(self, session: Session) -> None:
        """Send the current speculation plan of an announced session to its drafter."""
        self.send_message(session, PlanChange(handle=session.handle, plan=session.drafter_plan))

    def queue_prefix(self, session: Session) -> None:
        """Queue a session that began with a cached prefix, so that `send_queued_prefixes` sends
        this prefix to its drafter."""
        self._begun.append(session)

    def send_queued_prefixes(self) -> None:
        """Send the queued prefixes to the sessions' drafters.

        The copies are large: call this after a round was submitted, and before the verdicts of any
        round with these sessions are sent.
        """
        begun, self._begun = self._begun, []
        for session in begun:
            if session.link_id is not None and not (
                session.is_speculation_off or session.phase is ENDED
            ):
                for message in self._verdict_builder.build_catch_up(session):
                    self.send_message(session, message)

    def send_round(self, told: VerdictBatch) -> None:
        """Send each drafter the verdicts of its sessions in a round.

        Features are sent without a copy: their memory must not be overwritten until the outbox has
        passed on the posted messages.
        """
        self.send_verdicts(self._verdict_builder.advance_and_build(told))

    def send_verdicts(self, verdicts_by_link: Sequence[tuple[int, Verdicts]]) -> None:
        """Send verdicts that were already built, given as pairs (link id, verdicts). Features are
        sent without a copy, as by `send_round`."""
        for link_id, verdicts in verdicts_by_link:
            self._on_link[link_id].record_requests(int(np.count_nonzero(verdicts.draft_wanted)))
            self._post(_tell(link_id, verdicts))

    def send_message(self, session: Session, message: VerifierMessage) -> None:
        """Send a message to the session's drafter."""
        assert session.link_id is not None, session.session_id
        self._post(_tell(session.link_id, message))


def _tell(link_id: int, message: VerifierMessage) -> SendMessage:
    """Return the message to send. Verdicts are encoded by the calling thread, which owns the memory
    of their features."""
    if isinstance(message, Verdicts):
        message = EncodedMessage(encode_verdicts(message))
    return SendMessage(link_id, message)
