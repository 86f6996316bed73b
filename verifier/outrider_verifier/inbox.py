"""The inbox: proposals waiting for their prefix to become a session's current one (pure).

X session handles. What a session's next round can use is found in columns, a whole message of
proposals at once; drafts for prefixes that may come about later are few, and kept one by one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposal, Proposals

_SHARED_BYTES = 1 << 20
"""A message up to this size is kept as long as one of its drafts is; of a larger one, copies."""


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


class Held(NamedTuple):
    """A proposal where it lies."""

    proposals: Proposals
    entry: int
    nodes: int
    ahead: bool = False
    """Whether it was there before its prefix was."""

    @property
    def proposal(self) -> Proposal:
        """The proposal alone."""
        return self.proposals.entry(self.entry)


class Inbox:
    """At most one proposal for each session's current prefix, and `per_session` for later ones.

    Of those for later prefixes there are at most `total` in all; past that the oldest goes.
    """

    def __init__(self, *, max_sessions: int, per_session: int, total: int) -> None:
        self._per_session = per_session
        self._total = total
        self._digests = np.zeros(max_sessions, dtype=np.uint64)
        """[X] of the current prefixes."""
        self._lengths = np.zeros(max_sessions, dtype=np.int64)
        """[X] in tokens."""
        self._nodes = np.full(max_sessions, -1, dtype=np.int64)
        """[X]: nodes of the usable draft, -1 if there is none."""
        self._held = np.full(max_sessions, None, dtype=object)
        """[X]: the `Proposals` that the usable draft is an entry of, or None."""
        self._entries = np.zeros(max_sessions, dtype=np.int64)
        """[X]: which entry."""
        self._later: dict[int, dict[int, Proposal]] = {}
        """By handle and digest."""
        self._order: dict[tuple[int, int], None] = {}
        """(handle, digest) of all of these, oldest first."""

    def __len__(self) -> int:
        return int(np.count_nonzero(self._nodes >= 0)) + len(self._order)

    def move(
        self,
        handles: NDArray[np.int64],
        digests: NDArray[np.uint64],
        lengths: NDArray[np.int64],
    ) -> int:
        """Sessions [n] have these prefixes now; returns how many proposals that made stale."""
        stale = int(np.count_nonzero(self._nodes[handles] >= 0))
        self._digests[handles] = digests
        self._lengths[handles] = lengths
        self._nodes[handles] = -1
        self._held[handles] = None
        if self._later:
            for handle in handles.tolist():
                if handle in self._later:
                    stale += self._mature(handle)
        return stale

    def offer(
        self, proposals: Proposals, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], Counter[Offer]]:
        """Store the entries at `places` [n], whose handles are distinct and known.

        Returns which of them are for the current prefix [n], and what became of all.
        """
        handles, digests = proposals.handles[places], proposals.digests[places]
        lengths = proposals.prefix_lens[places]
        same = digests == self._digests[handles]
        current = same & (lengths == self._lengths[handles])
        shared = proposals.nbytes <= _SHARED_BYTES
        if shared and bool(current.all()) and bool((self._nodes[handles] < 0).all()):
            self._put(handles, proposals, places)
            return current, Counter({Offer.STORED: len(places)})
        stale = ~current & (same | (lengths <= self._lengths[handles]))
        first = current & (self._nodes[handles] < 0)
        results = Counter({Offer.STORED: int(first.sum()), Offer.STALE: int(stale.sum())})
        if shared:
            self._put(handles[first], proposals, places[first])
        else:
            for place in places[first].tolist():
                self._keep(proposals.entry(place))
        for index in np.flatnonzero(~first & ~stale).tolist():
            proposal = proposals.entry(int(places[index]))
            decide = self._offer_again if current[index] else self._offer_later
            results[decide(proposal)] += 1
        return current, results

    def nodes(self, handles: Sequence[int]) -> list[int]:
        """Nodes of the drafts that `take` would return; -1 where there is none."""
        found: list[int] = self._nodes[_places(handles)].tolist()
        return found

    def take(self, handles: Sequence[int]) -> list[Held]:
        """Remove and return the proposals for these sessions' current prefixes; all must have
        one."""
        places = _places(handles)
        columns = (self._held[places], self._entries[places], self._nodes[places])
        self._nodes[places] = -1
        self._held[places] = None
        return list(map(Held, *[column.tolist() for column in columns]))

    def drop(self, handle: int) -> None:
        """Forget everything of a session."""
        self._nodes[handle] = -1
        self._held[handle] = None
        for digest in list(self._later.get(handle, ())):
            self._remove(handle, digest)

    def _put(
        self, handles: NDArray[np.int64], proposals: Proposals, places: NDArray[np.int64]
    ) -> None:
        self._held[handles] = proposals
        self._entries[handles] = places
        self._nodes[handles] = proposals.node_counts[places]

    def _keep(self, proposal: Proposal) -> None:
        """One proposal alone, for its session's current prefix."""
        alone = Proposals.of([proposal])
        self._put(alone.handles, alone.copied(), np.zeros(1, dtype=np.int64))

    def _offer_again(self, proposal: Proposal) -> Offer:
        """For a current prefix that has one."""
        held: Proposals = self._held[proposal.handle]
        if not _better(proposal, held.entry(int(self._entries[proposal.handle]))):
            return Offer.DUPLICATE
        self._keep(proposal)
        return Offer.REPLACED

    def _offer_later(self, proposal: Proposal) -> Offer:
        handle, digest = proposal.handle, proposal.prefix_digest
        held = self._later.get(handle, {})
        (copy,) = Proposals.of([proposal]).copied().entries()
        if digest in held:
            if not _better(proposal, held[digest]):
                return Offer.DUPLICATE
            held[digest] = copy
            return Offer.REPLACED
        if len(held) >= self._per_session:
            return Offer.FULL
        if len(self._order) >= self._total:
            self._remove(*next(iter(self._order)))
        self._later.setdefault(handle, {})[digest] = copy
        self._order[handle, digest] = None
        return Offer.STORED

    def _mature(self, handle: int) -> int:
        """Sort out what was kept for later, now that the prefix has moved; returns what went."""
        digest, length = int(self._digests[handle]), int(self._lengths[handle])
        held = self._later[handle]
        over = [key for key, kept in held.items() if kept.prefix_len <= length or key == digest]
        gone = len(over)
        for key in over:
            proposal = held[key]
            self._remove(handle, key)
            if key == digest and proposal.prefix_len == length:
                self._keep(proposal)
                gone -= 1
        return gone

    def _remove(self, handle: int, digest: int) -> None:
        held = self._later[handle]
        del held[digest], self._order[handle, digest]
        if not held:
            del self._later[handle]


def _places(handles: Sequence[int]) -> NDArray[np.int64]:
    return np.array(handles, dtype=np.int64)


def _better(offered: Proposal, held: Proposal) -> bool:
    # A tree sampled from a draft law must not be chosen by its tokens' probabilities: the choice
    # would change the law. The first one stands.
    if offered.law is not None or held.law is not None:
        return False
    return expected_accepted_len(offered) > expected_accepted_len(held)
