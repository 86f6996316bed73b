"""Stores the proposals of drafters in the inbox and records the health of drafters.

Used on the engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider_verifier.exchange.proposal_inbox import OfferResult, ProposalInbox
from outrider_verifier.exchange.session_announcer import SessionAnnouncer
from outrider_verifier.exchange.verdict_builder import VerdictBuilder
from outrider_verifier.planner.speculation_policy import SpeculationPolicy
from outrider_verifier.state.commands import (
    MalformedMessage,
    ProposalsReceived,
    SessionsLostByDrafter,
)
from outrider_verifier.state.effects import DisconnectDrafter, Post
from outrider_verifier.state.session import Session

_COUNTER_OF = {offer: f"proposals_{offer.value}" for offer in OfferResult}


class ProposalIntake:
    """Processes the messages that drafters send about the sessions announced to them."""

    def __init__(
        self,
        *,
        inbox: ProposalInbox,
        verdict_builder: VerdictBuilder,
        drafters: SessionAnnouncer,
        policy: SpeculationPolicy,
        of_handle: Callable[[int], Session],
        counters: Counter[str],
        post: Post,
    ) -> None:
        """Create the intake. `of_handle` returns the session that has the given handle."""
        self._inbox = inbox
        self._verdict_builder = verdict_builder
        self._drafters = drafters
        self._policy = policy
        self._of_handle = of_handle
        self._counters = counters
        self._post = post
        self.arrivals: list[tuple[Session, int, float]] = []
        """Usable proposals that were not yet reported to the policy: (session, prefix length,
        arrival time). See `record_arrivals`."""

    def take_proposals(self, command: ProposalsReceived, now: float) -> None:
        """Check the proposals of a message, store the valid ones in the inbox, and update the
        drafter's health."""
        proposals, sound = command.proposals, command.valid
        drafter_health = self._drafters.health_of_link(command.link_id)
        if drafter_health is None or drafter_health.is_flooding:
            # The drafter's connection is closed or about to be closed.
            self._counters["proposals_unknown"] += len(proposals)
            return
        known = self._verdict_builder.announced_mask(command.link_id, proposals.handles)
        good = known & sound
        strays = unsound = 0
        if not bool(good.all()):
            strays = int(np.count_nonzero(sound & ~known))
            unsound = len(proposals) - int(np.count_nonzero(sound))
            self._counters["proposals_unknown"] += strays
            for handle in np.unique(proposals.handles[known & ~sound]).tolist():
                self._of_handle(handle).has_stalled_drafter = True
        offers = self._inbox.store_proposals(proposals, np.flatnonzero(good).tolist())
        for offer, count in offers.results.items():
            self._counters[_COUNTER_OF[offer]] += count
        missed = drafter_health.record_proposals(
            now,
            entries=len(proposals),
            nodes=len(proposals.tokens),
            useful=offers.results[OfferResult.STORED] + offers.results[OfferResult.REPLACED],
            unsound=unsound,
            strays=strays,
        )
        if missed:
            self._drafters.set_silent(command.link_id, silent=False)
        if drafter_health.is_flooding:
            self._post(DisconnectDrafter(command.link_id))
        if offers.stale:
            handles = proposals.handles
            self._note_stale(handles[offers.stale], set(handles[offers.late].tolist()), now)
        columns = proposals.handles[offers.current], proposals.prefix_lens[offers.current]
        arrived = dict(zip(*(column.tolist() for column in columns), strict=True))
        for handle, length in arrived.items():
            session = self._of_handle(handle)
            session.proposal_at = now
            self.arrivals.append((session, length, now))

    def record_malformed(self, command: MalformedMessage, now: float) -> None:
        """Record in a drafter's health that it sent a message that could not be decoded. Disconnect
        a drafter that sends too many of them."""
        drafter_health = self._drafters.health_of_link(command.link_id)
        if drafter_health is None or drafter_health.is_flooding:
            return
        drafter_health.record_malformed(now)
        if drafter_health.is_flooding:
            self._post(DisconnectDrafter(command.link_id))

    def reannounce_sessions(self, command: SessionsLostByDrafter, now: float) -> None:
        """Announce to a drafter once more the sessions that it has lost. This is done only a
        limited number of times per session."""
        drafter_health = self._drafters.health_of_link(command.link_id)
        if drafter_health is None or drafter_health.is_flooding:
            return
        drafter_health.record_lost_sessions(len(command.handles), now)
        if drafter_health.is_flooding:
            self._post(DisconnectDrafter(command.link_id))
        handles = np.array(command.handles, dtype=np.int64)
        for handle in set(
            handles[self._verdict_builder.announced_mask(command.link_id, handles)].tolist()
        ):
            self._drafters.reannounce(self._of_handle(handle))

    def record_timeout(self, session: Session) -> None:
        """Record that a session's proposal timeout has expired. If the drafter has sent no proposal
        for any session since the wait began, no session waits for it until its next message. So a
        stopped drafter costs one proposal timeout in all, not one per session."""
        self._policy.record_timeout(session)
        self._inbox.record_miss(session.handle)
        self._counters["proposal_timeouts"] += 1
        drafter_health = self._drafters.health_of_link(session.link_id)
        if drafter_health is not None and drafter_health.record_timeout(session.root_known_at):
            assert session.link_id is not None
            self._counters["drafters_stalled"] += 1
            self._drafters.set_silent(session.link_id, silent=True)

    def record_arrivals(self) -> None:
        """Pass the new entries of `arrivals` to the speculation policy. This is called after the
        round that uses them was submitted, so that it delays no session."""
        arrivals, self.arrivals = self.arrivals, []
        for session, prefix_len, at in arrivals:
            # Sessions did not wait for proposals that came during their round.
            if at >= session.root_known_at:
                self._policy.record_arrival(session, prefix_len=prefix_len, usable=True, now=at)

    def _note_stale(self, handles: NDArray[np.int64], in_vain: set[int], now: float) -> None:
        """Record drafts [n] that came too late, one call per session. Proposals of the sessions in
        `in_vain` are counted as late for the prefix that timed out."""
        for handle in np.unique(handles).tolist():
            session = self._of_handle(handle)
            length = (
                session.speculation_state.wait.missed_prefix_len
                if session.speculation_state and handle in in_vain
                else 0
            )
            self._policy.record_arrival(session, prefix_len=length, usable=False, now=now)
