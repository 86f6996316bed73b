"""Scheduler of grammar compilations: short first tries, and compilations with the full limits.

It starts no threads and reads no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_WAITING_FIRST: Final = 64
"""Maximum number of grammars that wait for their first try."""
MAX_WAITING_SLOW: Final = 16
"""Maximum number of grammars that wait to be compiled with the full limits."""


@dataclass(frozen=True, slots=True)
class CompileTask(Generic[ItemT]):
    """Compilation that a worker of the compile queue must run next. `item` is the caller's object
    for the grammar."""

    item: ItemT
    is_slow: bool
    """Whether the task is a compilation with the full limits instead of a first try."""


class CompileScheduler(Generic[ItemT]):
    """Chooses the compilation that the next free worker runs. An item is the caller's object for a
    grammar.

    With several workers, at least one never runs a compilation with the full limits, so that first
    tries do not wait long. First tries take turns by tenant. A single worker alternates between
    first tries and full compilations.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._max_slow = workers, max(1, workers - 1)
        self._first: OrderedDict[str, deque[ItemT]] = OrderedDict()
        """Waiting first tries of each tenant; the tenant whose turn is next comes first. No deque
        is empty."""
        self._slow: deque[ItemT] = deque()
        self._running = self._running_slow = 0
        self._was_slow = False
        """Whether the latest task was a full compile."""

    def add_first_try(self, item: ItemT, tenant: str) -> ItemT | None:
        """Add an item to the queue of first tries.

        If the queue then has more than MAX_WAITING_FIRST items, remove and return the oldest item
        of the tenant that has the most items in it; otherwise return None. A client that sends many
        grammars thus displaces only its own.
        """
        self._first.setdefault(tenant, deque()).append(item)
        if sum(map(len, self._first.values())) <= MAX_WAITING_FIRST:
            return None
        busiest = max(self._first, key=lambda name: len(self._first[name]))
        return self._pop(busiest)

    def add_full_compile(self, item: ItemT) -> bool:
        """Add an item to the queue of compilations with the full limits, and return True. If the
        queue is full, return False and do not add the item."""
        if len(self._slow) >= MAX_WAITING_SLOW:
            return False
        self._slow.append(item)
        return True

    def discard(self, item: ItemT) -> None:
        """Remove an item from its queue, if it waits in one."""
        if item in self._slow:
            self._slow.remove(item)
        for tenant, items in self._first.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._first[tenant]
                return

    def take(self) -> CompileTask[ItemT] | None:
        """Return the next task for a free worker, or None if all workers are busy or no task may
        start now.

        The worker counts as busy until `finish` is called with the task.
        """
        if self._running >= self._workers:
            return None
        may_be_slow = bool(self._slow) and self._running_slow < self._max_slow
        if may_be_slow and self._first and self._workers == 1:
            may_be_slow = not self._was_slow
        if may_be_slow:
            turn = CompileTask(self._slow.popleft(), is_slow=True)
        elif self._first:
            turn = CompileTask(self._pop(next(iter(self._first))), is_slow=False)
        else:
            return None
        self._was_slow = turn.is_slow
        self._running += 1
        self._running_slow += turn.is_slow
        return turn

    def finish(self, turn: CompileTask[ItemT]) -> None:
        """Record that a task has ended and that its worker is free again."""
        self._running -= 1
        self._running_slow -= turn.is_slow

    def _pop(self, tenant: str) -> ItemT:
        """Remove and return a tenant's longest-waiting item, and move the tenant to the end of the
        turns."""
        items = self._first[tenant]
        item = items.popleft()
        if items:
            self._first.move_to_end(tenant)
        else:
            del self._first[tenant]
        return item
