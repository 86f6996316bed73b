"""Order of grammar compiles: short first tries for all, full compiles for few. Pure."""

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
    """Next task of a compile worker."""

    item: ItemT
    is_slow: bool
    """Whether the task is a compile with the full limits instead of a first try."""


class CompileScheduler(Generic[ItemT]):
    """Chooses the next grammar to compile; pure.

    At least one of several workers is always left to first tries, in which tenants take turns. A
    single worker alternates between first tries and full compiles.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._max_slow = workers, max(1, workers - 1)
        self._first: OrderedDict[str, deque[ItemT]] = OrderedDict()
        """Waiting first tries by tenant, in the order of the tenants' turns; no queue is empty."""
        self._slow: deque[ItemT] = deque()
        self._running = self._running_slow = 0
        self._was_slow = False
        """Whether the latest task was a full compile."""

    def add_first_try(self, item: ItemT, tenant: str) -> ItemT | None:
        """Add an item to the first tries.

        If the queue is full, the item that has waited longest, of the tenant with the most waiting
        items, is removed and returned; otherwise returns None. So a client that sends many grammars
        displaces only its own.
        """
        self._first.setdefault(tenant, deque()).append(item)
        if sum(map(len, self._first.values())) <= MAX_WAITING_FIRST:
            return None
        busiest = max(self._first, key=lambda name: len(self._first[name]))
        return self._pop(busiest)

    def add_full_compile(self, item: ItemT) -> bool:
        """Add an item to the full compiles. Returns False if too many items wait."""
        if len(self._slow) >= MAX_WAITING_SLOW:
            return False
        self._slow.append(item)
        return True

    def discard(self, item: ItemT) -> None:
        """Remove an item if it is waiting."""
        if item in self._slow:
            self._slow.remove(item)
        for tenant, items in self._first.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._first[tenant]
                return

    def take(self) -> CompileTask[ItemT] | None:
        """Return the next task of a free worker, or None if no worker is free or no task may
        start."""
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
        """Record that the worker of a task is free again."""
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
