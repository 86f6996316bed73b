"""Bounded asyncio queue that can be closed with an error."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from outrider.errors import OutriderError

ItemT = TypeVar("ItemT")

MAX_ITEMS = 256
MAX_BYTES = 16 << 20


def _no_size(_: object) -> int:
    return 0


class BoundedQueue(Generic[ItemT]):
    """FIFO bounded by the number of items and by their total size.

    `put` waits while it is full, `get` while it is empty. After `close(error)` every `put` raises
    the error; `get` hands out what is left, then raises it too. Both may be cancelled at any time
    without losing an item. An item larger than the bound passes alone.
    """

    def __init__(
        self,
        *,
        max_items: int = MAX_ITEMS,
        max_size: int = MAX_BYTES,
        size_of: Callable[[ItemT], int] = _no_size,
    ) -> None:
        self._items: deque[ItemT] = deque()
        self._max_items = max_items
        self._max_size = max_size
        self._size_of = size_of
        self._size = 0
        self._error: OutriderError | None = None
        self._getters: deque[asyncio.Future[None]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def size(self) -> int:
        """Total size of the items."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._error is not None

    @property
    def is_full(self) -> bool:
        """Whether there is no room even for the smallest item."""
        return self._full(0)

    def _full(self, size: int) -> bool:
        return bool(self._items) and (
            len(self._items) >= self._max_items or self._size + size > self._max_size
        )

    async def put(self, item: ItemT) -> None:
        """Append an item; waits for room. Raises the error of `close`."""
        while not self.try_put(item):
            await _park(self._putters)
        if self._putters and not self._full(0):
            _wake(self._putters)

    def try_put(self, *items: ItemT) -> bool:
        """Append items, all of them if there is room for the first now, else none. Raises the
        error of `close`."""
        if self._error is not None:
            raise self._error.copy()
        if items and self._full(self._size_of(items[0])):
            return False
        self.put_unbounded(*items)
        return True

    def put_unbounded(self, *items: ItemT) -> None:
        """Append items that are here, whether or not there is room: the caller gets no more of them
        before there is. Dropped after `close`."""
        if self._error is not None:
            return
        self._items.extend(items)
        self._size += sum(map(self._size_of, items))
        for _ in items:
            _wake(self._getters)

    async def get(self) -> ItemT:
        """The oldest item; waits for one. Raises the error of `close` once empty."""
        while not self._items:
            if self._error is not None:
                raise self._error.copy()
            await _park(self._getters)
        item = self._items.popleft()
        self._size -= self._size_of(item)
        _wake(self._putters)
        if self._items:
            _wake(self._getters)
        return item

    def take_some(self, max_items: int, max_size: int) -> list[ItemT]:
        """Items that are there now, within both bounds but at least one if there is any.

        Raises the error of `close` once empty.
        """
        if not self._items and self._error is not None:
            raise self._error.copy()
        taken: list[ItemT] = []
        size = 0
        while self._items and len(taken) < max_items:
            size += self._size_of(self._items[0])
            if taken and size > max_size:
                break
            item = self._items.popleft()
            self._size -= self._size_of(item)
            taken.append(item)
            _wake(self._putters)
        return taken

    def take_all(self) -> list[ItemT]:
        """All items that are there now; never raises."""
        taken = list(self._items)
        self._items.clear()
        self._size = 0
        _wake(self._putters)
        return taken

    async def wait(self, timeout_s: float) -> bool:
        """Wait until an item is there or the bounded queue is closed; False if time ran out
        first."""
        if self._items or self._error is not None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                while not self._items and self._error is None:
                    await _park(self._getters)
        except TimeoutError:
            return False
        return True

    def close(self, error: OutriderError, *, discard: bool = False) -> None:
        """Refuse further items and wake everyone; with `discard` drop what is left. The first
        error stays."""
        if self._error is None:
            self._error = error
        if discard:
            self._items.clear()
            self._size = 0
        for waiters in (self._getters, self._putters):
            while waiters:
                _wake(waiters)


async def _park(waiters: deque[asyncio.Future[None]]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future in waiters:
            waiters.remove(future)
        elif not future.cancelled():
            # Woken and cancelled at once: the wake-up belongs to the next waiter.
            _wake(waiters)
        raise


def _wake(waiters: deque[asyncio.Future[None]]) -> None:
    while waiters:
        future = waiters.popleft()
        if not future.done():
            future.set_result(None)
            return
