"""Proposals on their way into the inbox, and what their coming tells of drafters (engine thread
only)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider_verifier.commands import Offered
from outrider_verifier.handover import Handover
from outrider_verifier.inbox import Inbox, Offer
from outrider_verifier.policy import Policy
from outrider_verifier.sessions import Session

_COUNTER_OF = {offer: f"proposals_{offer.value}" for offer in Offer}


class Arrivals:
    """Takes in what drafters offer; sessions are the caller's."""

    def __init__(
        self,
        inbox: Inbox,
        handover: Handover,
        policy: Policy,
        *,
        session_of: Callable[[int], Session],
        counters: Counter[str],
    ) -> None:
        """`session_of`: by a handle that is announced."""
        self._inbox, self._handover, self._policy = inbox, handover, policy
        self._session_of, self._counters = session_of, counters
        self._arrived: list[tuple[Session, int, float]] = []
        """Usable proposals that the policy has yet to hear of: session, length of the prefix, when.
        """

    def offer(self, command: Offered, now: float) -> None:
        """Proposals have come."""
        proposals, sound = command.proposals, command.sound
        known = self._handover.owned(command.link_id, proposals.handles)
        good = known & sound
        if not bool(good.all()):
            self._counters["proposals_unknown"] += int(np.count_nonzero(sound & ~known))
            for handle in np.unique(proposals.handles[known & ~sound]).tolist():
                self._session_of(handle).suspect = True
        offers = self._inbox.offer(proposals, np.flatnonzero(good).tolist())
        for offer, count in offers.results.items():
            self._counters[_COUNTER_OF[offer]] += count
        if offers.stale:
            handles = proposals.handles
            self._note_stale(handles[offers.stale], set(handles[offers.late].tolist()), now)
        arrived = {int(proposals.handles[place]): place for place in offers.current}
        for handle, place in arrived.items():
            session = self._session_of(handle)
            session.proposal_at = now
            self._arrived.append((session, int(proposals.prefix_lens[place]), now))

    def _note_stale(self, handles: NDArray[np.int64], in_vain: set[int], now: float) -> None:
        """Of drafts [n] that came too late: which sessions were served at all, and which of them,
        `in_vain`, with what they had waited for. One call a session, however many drafts."""
        for handle in np.unique(handles).tolist():
            session = self._session_of(handle)
            length = session.pace.missed_len if session.pace and handle in in_vain else 0
            self._policy.arrived(session, prefix_len=length, usable=False, now=now)

    def book(self) -> None:
        """Let the policy know of the usable proposals that have come: when the round that uses
        them is under way, for until then their sessions wait for nothing."""
        arrived, self._arrived = self._arrived, []
        for session, prefix_len, at in arrived:
            # For what came while a round of its session ran nobody waited.
            if at >= session.since:
                self._policy.arrived(session, prefix_len=prefix_len, usable=True, now=at)
