"""The inbox as it would be written for one proposal at a time; slow, and plain to see."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider_verifier.exchange.proposal_inbox import OfferResult

from outrider.wire.messages import Proposal

Prefix = tuple[int, int]
"""Digest and length."""


def promise(proposal: Proposal) -> float:
    """Draft tokens expected to stand."""
    return sum(math.exp(float(logprob)) for logprob in proposal.tree.logprobs)


def better(offered: Proposal, held: Proposal) -> bool:
    """Whether it takes the other's place."""
    if offered.distribution is not None or held.distribution is not None:
        return False
    return promise(offered) > promise(held)


@dataclass
class _Session:
    prefix: Prefix | None = None
    usable: Proposal | None = None
    ahead: bool = False
    later: list[Proposal | None] = field(default_factory=list)
    next: int = 0


class SlowInbox:
    """As `ProposalInbox`, without a budget of memory."""

    def __init__(self, handles: Sequence[int], *, per_session: int, reach: int) -> None:
        self.per_session, self.reach = per_session, reach
        self.sessions = {handle: self._new() for handle in handles}

    def _new(self) -> _Session:
        return _Session(later=[None] * self.per_session)

    def __len__(self) -> int:
        return sum(
            (session.usable is not None) + sum(kept is not None for kept in session.later)
            for session in self.sessions.values()
        )

    def open(self, handle: int) -> None:
        """A session begins."""
        self.sessions[handle] = self._new()

    def drop(self, handle: int) -> None:
        """A session is over; its prefix stays until another one takes the place."""
        prefix = self.sessions[handle].prefix
        self.sessions[handle] = self._new()
        self.sessions[handle].prefix = prefix

    def move(self, handle: int, prefix: Prefix) -> int:
        """A session has this prefix now; how many drafts went."""
        session = self.sessions[handle]
        gone = int(session.usable is not None)
        session.prefix, session.usable, session.ahead = prefix, None, False
        for place, kept in enumerate(session.later):
            if kept is None or not (
                kept.prefix_digest == prefix[0] or kept.prefix_len <= prefix[1]
            ):
                continue
            session.later[place] = None
            if (kept.prefix_digest, kept.prefix_len) == prefix:
                session.usable, session.ahead = kept, True
            else:
                gone += 1
        return gone

    def offer(self, message: Sequence[Proposal]) -> Counter[OfferResult]:
        """A message comes."""
        results: Counter[OfferResult] = Counter()
        taken: Counter[int] = Counter()
        chosen: dict[tuple[int, int], Proposal] = {}
        for proposal in message:
            session, key = self.sessions[proposal.handle], (proposal.handle, proposal.prefix_digest)
            if self._stale(session, proposal):
                results[OfferResult.STALE] += 1
                continue
            if (proposal.prefix_digest, proposal.prefix_len) != session.prefix:
                taken[proposal.handle] += 1
                if taken[proposal.handle] > self.per_session:
                    results[OfferResult.FULL] += 1
                    continue
            if key in chosen:
                results[OfferResult.DUPLICATE] += 1
                if not better(proposal, chosen[key]):
                    continue
                # It comes where it stands in the message, not where the worse one stood.
                del chosen[key]
            chosen[key] = proposal
        fresh = [proposal for proposal in chosen.values() if not self._replace(proposal, results)]
        for proposal in fresh:
            self._put(proposal)
            results[OfferResult.STORED] += 1
        return results

    def take(self, handle: int) -> tuple[Proposal, bool] | None:
        """The usable draft, and whether it is a hit."""
        session = self.sessions[handle]
        found, session.usable = session.usable, None
        return None if found is None else (found, session.ahead)

    def _stale(self, session: _Session, proposal: Proposal) -> bool:
        if session.prefix is None:
            return True
        digest, length = session.prefix
        further = proposal.prefix_len - length
        if proposal.prefix_digest == digest:
            return further != 0
        return not 0 < further <= self.reach

    def _replace(self, proposal: Proposal, results: Counter[OfferResult]) -> bool:
        """Whether one for the same prefix was held; the better one stays."""
        session = self.sessions[proposal.handle]
        if session.prefix == (proposal.prefix_digest, proposal.prefix_len):
            held = session.usable
            if held is not None and better(proposal, held):
                session.usable, session.ahead = proposal, False
        else:
            place = next(
                (
                    place
                    for place, kept in enumerate(session.later)
                    if kept is not None and kept.prefix_digest == proposal.prefix_digest
                ),
                None,
            )
            held = None if place is None else session.later[place]
            if place is not None and held is not None and better(proposal, held):
                session.later[place] = proposal
        if held is not None:
            results[OfferResult.REPLACED if better(proposal, held) else OfferResult.DUPLICATE] += 1
        return held is not None

    def _put(self, proposal: Proposal) -> None:
        """Store one for a prefix that has none: the current one, or in the place that was written
        longest ago."""
        session = self.sessions[proposal.handle]
        if session.prefix == (proposal.prefix_digest, proposal.prefix_len):
            session.usable, session.ahead = proposal, False
            return
        session.later[session.next] = proposal
        session.next = (session.next + 1) % self.per_session
