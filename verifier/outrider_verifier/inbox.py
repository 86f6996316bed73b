"""The inbox: proposals waiting for their prefix to become a session's current one (pure)."""

from __future__ import annotations

import math
from enum import StrEnum

from outrider.ids import SessionId
from outrider.wire.messages import Proposal


class Offer(StrEnum):
    """What became of an offered proposal."""

    STORED = "stored"
    REPLACED = "replaced"
    """A less promising proposal for the same prefix made room."""
    DUPLICATE = "duplicate"
    """One at least as promising is held for the same prefix."""
    STALE = "stale"
    """Its prefix is not, and can no longer become, the session's."""
    FULL = "full"
    """The session holds its share of proposals for future prefixes already."""


def expected_accepted_len(proposal: Proposal) -> float:
    """Sum of the path probabilities: the draft tokens that the drafter expects to stand."""
    return sum(map(math.exp, proposal.tree.logprobs.tolist()))


class Inbox:
    """Proposals by (session, prefix digest), at most `per_session` each and `total` in all.

    Past `total` the oldest entry of all goes. A proposal for the current prefix always finds
    room in its session: it is the one that the next round can use.
    """

    def __init__(self, *, per_session: int, total: int) -> None:
        self._per_session = per_session
        self._total = total
        self._by_session: dict[SessionId, dict[int, Proposal]] = {}
        self._order: dict[tuple[SessionId, int], None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def offer(self, proposal: Proposal, *, digest: int, prefix_len: int) -> Offer:
        """Store a proposal, given the session's current prefix digest and length."""
        key = proposal.prefix_digest
        current = key == digest and proposal.prefix_len == prefix_len
        if not current and (key == digest or proposal.prefix_len <= prefix_len):
            return Offer.STALE
        held = self._by_session.get(proposal.session_id, {})
        if key in held:
            # A tree sampled from a draft law must not be chosen by its tokens' probabilities:
            # the choice would change the law. The first one stands.
            sampled = proposal.law is not None or held[key].law is not None
            if sampled or expected_accepted_len(proposal) <= expected_accepted_len(held[key]):
                return Offer.DUPLICATE
            held[key] = proposal
            return Offer.REPLACED
        if len(held) >= self._per_session:
            if not current:
                return Offer.FULL
            self._remove(proposal.session_id, next(iter(held)))
        if len(self._order) >= self._total:
            self._remove(*next(iter(self._order)))
        self._by_session.setdefault(proposal.session_id, {})[key] = proposal
        self._order[proposal.session_id, key] = None
        return Offer.STORED

    def peek(self, session_id: SessionId, digest: int) -> Proposal | None:
        """The proposal that `take` would return."""
        held = self._by_session.get(session_id)
        return None if held is None else held.get(digest)

    def take(self, session_id: SessionId, digest: int) -> Proposal | None:
        """Remove and return the proposal for this prefix, if there is one."""
        held = self._by_session.get(session_id)
        if held is None or digest not in held:
            return None
        proposal = held[digest]
        self._remove(session_id, digest)
        return proposal

    def prune(self, session_id: SessionId, *, digest: int, prefix_len: int) -> int:
        """Drop what the session's new prefix made stale; returns how many went."""
        held = self._by_session.get(session_id)
        if not held:
            return 0
        stale = [
            key
            for key, proposal in held.items()
            if proposal.prefix_len <= prefix_len and key != digest
        ]
        for key in stale:
            self._remove(session_id, key)
        return len(stale)

    def drop_session(self, session_id: SessionId) -> None:
        """Forget everything of a session."""
        for key in list(self._by_session.get(session_id, ())):
            self._remove(session_id, key)

    def _remove(self, session_id: SessionId, key: int) -> None:
        held = self._by_session[session_id]
        del held[key], self._order[session_id, key]
        if not held:
            del self._by_session[session_id]
