"""Shares a drafter fairly between its verifiers: message intake and drafting take turns.

The rules matter when there is more to do than can be done at once.
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
"""Sessions that are drafted for before messages are looked at again: one launch on a device."""
MAX_MESSAGES_PER_TURN: Final = 64
"""Messages of a connection that are taken in before those of the others are looked at again."""
MAX_POLLS: Final = 8
"""Looks for messages before drafts that are wanted are made, whoever has still more to say."""


def choose_fairly(connections: Indices, wished_at: Indices, at_most: int) -> Indices:
    """Which of n wishes for a draft are served now: of every connection in turn the oldest.

    `connections` [n] are those of the sessions, `wished_at` [n] grows with time. Returns at most
    `at_most` places, ascending.
    """
    oldest_first = np.lexsort((wished_at, connections))
    owners = connections[oldest_first]
    begins = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    # How many of the same connection are older.
    turns = np.arange(len(owners)) - np.repeat(begins, np.diff(np.r_[begins, len(owners)]))
    in_turn = oldest_first[np.lexsort((wished_at[oldest_first], turns))]
    found: Indices = np.sort(in_turn[:at_most])
    return found


class FairQueue(Generic[MessageT]):
    """Messages by connection, in order; connections take turns."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[MessageT]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add_messages(self, messages: Iterable[tuple[int, MessageT]]) -> None:
        """Add (connection, message) behind what waits of the connection."""
        for connection, message in messages:
            self._queues.setdefault(connection, deque()).append(message)

    def take_messages(
        self, at_most: int = MAX_MESSAGES_PER_TURN
    ) -> Generator[tuple[int, MessageT]]:
        """Remove and return one (connection, message) of every connection in turn, at most so many
        of each. Those that are not asked for stay."""
        for _ in range(at_most):
            if not self._queues:
                return
            for connection, queue in list(self._queues.items()):
                message = queue.popleft()
                if not queue:
                    del self._queues[connection]
                yield connection, message
