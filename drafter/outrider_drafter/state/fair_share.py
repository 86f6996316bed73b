"""Shares a drafter fairly between its verifiers: message intake and drafting take turns.

The limits and the order of service in this module matter only when the drafter is overloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

MessageT = TypeVar("MessageT")
Indices = NDArray[np.int64]

MAX_BATCH_SESSIONS: Final = 64
"""Maximum number of sessions that are drafted for before messages are polled again. They fit into
one launch on a device."""
MAX_MESSAGES_PER_TURN: Final = 64
"""Maximum number of messages of one connection that are taken in per turn."""
MAX_POLLS: Final = 8
"""Maximum number of polls for messages before the wanted drafts are made, even if verifiers keep
sending."""


def choose_fairly(connections: Indices, wished_at: Indices, at_most: int) -> Indices:
    """Choose which of n draft requests are served now: the oldest request of each connection, then
    the second oldest of each, and so on.

    `connections` [n]: connection of each request; `wished_at` [n]: number that increases with the
    time of the request. Returns the indices of at most `at_most` requests, ascending.
    """
    oldest_first = np.lexsort((wished_at, connections))
    owners = connections[oldest_first]
    begins = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    # Number of older requests of the same connection.
    turns = np.arange(len(owners)) - np.repeat(begins, np.diff(np.r_[begins, len(owners)]))
    in_turn = oldest_first[np.lexsort((wished_at[oldest_first], turns))]
    found: Indices = np.sort(in_turn[:at_most])
    return found


class FairQueue(Generic[MessageT]):
    """Queue of messages of several connections. Connections take turns, and the messages of each
    connection keep their order."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[MessageT]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add_messages(self, messages: Iterable[tuple[int, MessageT]]) -> None:
        """Append (connection, message) pairs to the queues of their connections."""
        for connection, message in messages:
            self._queues.setdefault(connection, deque()).append(message)

    def take_messages(
        self, at_most: int = MAX_MESSAGES_PER_TURN
    ) -> Generator[tuple[int, MessageT]]:
        """Remove and yield (connection, message) pairs: in each turn one message of every
        connection, and at most `at_most` messages of a connection in all. If the iterator is closed
        early, the other messages remain in the queue."""
        for _ in range(at_most):
            if not self._queues:
                return
            for connection, queue in list(self._queues.items()):
                message = queue.popleft()
                if not queue:
                    del self._queues[connection]
                yield connection, message
