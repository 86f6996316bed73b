"""Received proposal messages, held for their single entries within a memory budget. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import Proposals


class PooledEntry:
    """A draft that is held, or was."""

    __slots__ = ("digest", "entry", "handle", "length", "message", "nodes", "place")

    def __init__(
        self, message: PooledMessage, entry: int, handle: int, digest: int, length: int, nodes: int
    ) -> None:
        """An entry of a message, for a prefix of so many tokens."""
        self.message, self.entry, self.nodes = message, entry, nodes
        self.handle, self.digest, self.length = handle, digest, length
        self.place = -1
        """Which of its session's places for later it has; -1: none, it is for the current prefix.
        """

    @property
    def expected_tokens(self) -> float:
        """Tokens that its round is expected to emit; see `expected_accepted_tokens`."""
        return self.message.expected_tokens(self.entry)


class PooledMessage:
    """Proposals with those of their entries that are held."""

    __slots__ = ("_promises", "held", "nbytes", "proposals")

    def __init__(self, proposals: Proposals) -> None:
        self.proposals = proposals
        self.held: dict[int, PooledEntry] = {}
        """By entry."""
        self.nbytes = 0
        """What keeping it takes; 0 until it is kept."""
        self._promises: NDArray[np.float64] | None = None

    def expected_tokens(self, entry: int) -> float:
        """See `expected_accepted_tokens`; computed once for all entries."""
        known = self._promises
        if known is None:
            known = self._promises = expected_accepted_tokens(self.proposals)
        return float(known[entry])

    def compact(self) -> None:
        """Be of nothing but the entries that are held."""
        held = list(self.held.values())
        self.proposals = self.proposals.select(np.array([kept.entry for kept in held]))
        self._promises = None
        for entry, kept in enumerate(held):
            kept.entry = entry
        self.held = dict(enumerate(held))


class MessagePool:
    """Held messages; each is freed with its last entry, the oldest one when all take too much."""

    def __init__(self, *, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._by_age: dict[PooledMessage, None] = {}
        """Oldest first."""
        self.nbytes = 0
        """What all of them take."""

    def add_message(self, message: PooledMessage) -> None:
        """Keep a message for its entries that are held: whole, or, where less than half of it is,
        as these."""
        if not message.held:
            return
        if 2 * len(message.held) < len(message.proposals):
            message.compact()
        message.nbytes = message.proposals.nbytes
        self._by_age[message] = None
        self.nbytes += message.nbytes

    def drop_entries(self, gone: Sequence[PooledEntry]) -> None:
        """These entries are held no more."""
        for kept in gone:
            message = kept.message
            held = message.held
            del held[kept.entry]
            if not held and message in self._by_age:
                del self._by_age[message]
                self.nbytes -= message.nbytes

    @property
    def oldest_excess(self) -> PooledMessage | None:
        """The message to forget next because all take too much; None: they do not. The newest one
        stays, whatever it takes."""
        if self.nbytes <= self._budget_bytes or len(self._by_age) < 2:
            return None
        return next(iter(self._by_age))


def expected_accepted_tokens(message: Proposals) -> NDArray[np.float64]:
    """[S]: draft tokens that the drafter expects to stand, the sum of the path probabilities; NaN
    for an entry with a draft distribution. A tree sampled from its distribution must not be chosen
    by its tokens' probabilities, for the choice would change the distribution: NaN is neither more
    nor less."""
    owners = np.arange(len(message)).repeat(message.node_counts)
    weights = np.exp(message.logprobs, dtype=np.float64)
    result = np.bincount(owners, weights, minlength=len(message)).astype(np.float64)
    if message.distributions is not None:
        result[message.distributions.has_distribution] = np.nan
    return result
