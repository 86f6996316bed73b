"""What drafters say, taken in: proposals go to the inbox, and tell how well their drafter is.

Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider_verifier.exchange.proposal_inbox import Inbox, Offer
from outrider_verifier.exchange.session_announcer import Announcer
from outrider_verifier.exchange.verdict_builder import Handover
from outrider_verifier.planner.speculation_policy import Policy
from outrider_verifier.state.commands import Garbled, Lost, Offered
from outrider_verifier.state.effects import Cut, Post
from outrider_verifier.state.session import Session

_COUNTER_OF = {offer: f"proposals_{offer.value}" for offer in Offer}


class Incoming:
    """Takes in what drafters say of the sessions that are announced to them."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        handover: Handover,
        drafters: Announcer,
        policy: Policy,
        of_handle: Callable[[int], Session],
        counters: Counter[str],
        post: Post,
    ) -> None:
        """`of_handle`: the session that is being served under a handle."""
        self._inbox = inbox
        self._handover = handover
        self._drafters = drafters
        self._policy = policy
        self._of_handle = of_handle
        self._counters = counters
        self._post = post
        self._arrivals: list[tuple[Session, int, float]] = []
        """Usable proposals that the policy has yet to hear of: session, length of the prefix, when.
        """

    def offer(self, command: Offered, now: float) -> None:
        """Proposals came."""
        proposals, sound = command.proposals, command.sound
        conduct = self._drafters.conduct_on(command.link_id)
        if conduct is None or conduct.floods:
            # Its connection is over, or about to be.
            self._counters["proposals_unknown"] += len(proposals)
            return
        known = self._handover.owned(command.link_id, proposals.handles)
        good = known & sound
        strays = unsound = 0
        if not bool(good.all()):
            strays = int(np.count_nonzero(sound & ~known))
            unsound = len(proposals) - int(np.count_nonzero(sound))
            self._counters["proposals_unknown"] += strays
            for handle in np.unique(proposals.handles[known & ~sound]).tolist():
                self._of_handle(handle).suspect = True
        offers = self._inbox.offer(proposals, np.flatnonzero(good).tolist())
        for offer, count in offers.results.items():
            self._counters[_COUNTER_OF[offer]] += count
        missed = conduct.heard(
            now,
            entries=len(proposals),
            nodes=len(proposals.tokens),
            useful=offers.results[Offer.STORED] + offers.results[Offer.REPLACED],
            unsound=unsound,
            strays=strays,
        )
        if missed:
            self._drafters.turn_silent(command.link_id, silent=False)
        if conduct.floods:
            self._post(Cut(command.link_id))
        if offers.stale:
            handles = proposals.handles
            self._note_stale(handles[offers.stale], set(handles[offers.late].tolist()), now)
        columns = proposals.handles[offers.current], proposals.prefix_lens[offers.current]
        arrived = dict(zip(*(column.tolist() for column in columns), strict=True))
        for handle, length in arrived.items():
            session = self._of_handle(handle)
            session.proposal_at = now
            self._arrivals.append((session, length, now))

    def garbled(self, command: Garbled, now: float) -> None:
        """A message came that could not be read."""
        conduct = self._drafters.conduct_on(command.link_id)
        if conduct is None or conduct.floods:
            return
        conduct.babbled(now)
        if conduct.floods:
            self._post(Cut(command.link_id))

    def lost(self, command: Lost, now: float) -> None:
        """Begin anew with sessions that their drafter lost, a few times each."""
        conduct = self._drafters.conduct_on(command.link_id)
        if conduct is None or conduct.floods:
            return
        conduct.gave_up(len(command.handles), now)
        if conduct.floods:
            self._post(Cut(command.link_id))
        handles = np.array(command.handles, dtype=np.int64)
        for handle in set(handles[self._handover.owned(command.link_id, handles)].tolist()):
            self._drafters.announce_again(self._of_handle(handle))

    def missed(self, session: Session) -> None:
        """A patience ran out. Where the drafter has said nothing to anybody since this wait began,
        nobody waits for it until it does: it costs one patience, not one a session."""
        self._policy.missed(session)
        self._inbox.missed(session.handle)
        self._counters["patience_over"] += 1
        conduct = self._drafters.conduct_on(session.link_id)
        if conduct is not None and conduct.failed(session.since):
            assert session.link_id is not None
            self._counters["drafters_silent"] += 1
            self._drafters.turn_silent(session.link_id, silent=True)

    def book_arrivals(self) -> None:
        """Let the policy know of the usable proposals that have come: when the round that uses
        them is under way, for until then their sessions wait for nothing."""
        arrivals, self._arrivals = self._arrivals, []
        for session, prefix_len, at in arrivals:
            # For what came while a round of its session ran nobody waited.
            if at >= session.since:
                self._policy.arrived(session, prefix_len=prefix_len, usable=True, now=at)

    def _note_stale(self, handles: NDArray[np.int64], in_vain: set[int], now: float) -> None:
        """Of drafts [n] that came too late: which sessions were served at all, and which of them,
        `in_vain`, with what they had waited for. One call a session, however many drafts."""
        for handle in np.unique(handles).tolist():
            session = self._of_handle(handle)
            length = session.pace.missed_len if session.pace and handle in in_vain else 0
            self._policy.arrived(session, prefix_len=length, usable=False, now=now)
