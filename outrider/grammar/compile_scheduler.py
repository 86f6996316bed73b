"""Order of grammar compiles: short first tries for all, full compiles for few. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

MAX_WAITING_FIRST: Final = 64
"""Grammars that may wait for their first try."""
MAX_WAITING_SLOW: Final = 16
"""Grammars that may wait to be compiled with the full limits."""


@dataclass(frozen=True, slots=True)
class CompileTask(Generic[ItemT]):
    """Next task of a compile worker."""

    item: ItemT
    is_slow: bool
    """Whether it is a compile with the full limits, and not a first try."""


class CompileScheduler(Generic[ItemT]):
    """Chooses the next grammar to compile; pure. At least one of several workers is always left to
    first tries, in which tenants take turns; a single worker serves both queues in turn."""

    def __init__(self, workers: int) -> None:
        self._workers, self._max_slow = workers, max(1, workers - 1)
        self._first: OrderedDict[str, deque[ItemT]] = OrderedDict()
        """Waiting first tries by tenant, the tenant whose turn is next first; none is empty."""
        self._slow: deque[ItemT] = deque()
        self._running = self._running_slow = 0
        self._was_slow = False
        """Whether the latest turn was of the slow lane."""

    def add_first_try(self, item: ItemT, tenant: str) -> ItemT | None:
        """Have an item wait for its first try. Returns the item that makes way for it, None if
        there is room: the one that has waited longest of the tenant that has most waiting. A client
        whose many grammars fill the lane so refuses neither others nor its own later ones."""
        self._first.setdefault(tenant, deque()).append(item)
        if sum(map(len, self._first.values())) <= MAX_WAITING_FIRST:
            return None
        busiest = max(self._first, key=lambda name: len(self._first[name]))
        return self._pop(busiest)

    def add_full_compile(self, item: ItemT) -> bool:
        """Have an item wait for a compile with the full limits; False: too many wait."""
        if len(self._slow) >= MAX_WAITING_SLOW:
            return False
        self._slow.append(item)
        return True

    def discard(self, item: ItemT) -> None:
        """Let an item wait no longer, if it does."""
        if item in self._slow:
            self._slow.remove(item)
        for tenant, items in self._first.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._first[tenant]
                return

    def take(self) -> CompileTask[ItemT] | None:
        """What a free worker begins now; None: no worker is free, or nothing may begin."""
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
        """Note that a worker is free again."""
        self._running -= 1
        self._running_slow -= turn.is_slow

    def _pop(self, tenant: str) -> ItemT:
        """The item of a tenant that has waited longest; the tenant's next turn comes last."""
        items = self._first[tenant]
        item = items.popleft()
        if items:
            self._first.move_to_end(tenant)
        else:
            del self._first[tenant]
        return item
