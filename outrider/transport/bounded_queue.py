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
    """FIFO queue limited by its number of items and by their total size.

    `put` waits while the queue is full, and `get` waits while it is empty. After `close(error)`,
    every `put` raises the error, and `get` returns the remaining items and then raises the error
    too. Both may be cancelled at any time without losing an item. An item larger than the size
    limit is accepted when the queue is empty.
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
        """Total size of the items, in the unit of `size_of`."""
        return self._size

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._error is not None

    @property
    def is_full(self) -> bool:
        """Whether the queue cannot accept even the smallest item."""
        return self._full(0)

    def _full(self, size: int) -> bool:
        return bool(self._items) and (
            len(self._items) >= self._max_items or self._size + size > self._max_size
        )

    async def put(self, item: ItemT) -> None:
        """Wait until the queue has space, then append an item. Raises the error given to `close` if
        the queue is closed.
        """
        while not self.try_put(item):
            await _park(self._putters)
        if self._putters and not self._full(0):
            _wake(self._putters)

    def try_put(self, *items: ItemT) -> bool:
        """Append all items and return True if the first one fits into the queue now. Otherwise
        append none and return False. Raises the error given to `close` if the queue is closed.
        """
        if self._error is not None:
            raise self._error.copy()
        if items and self._full(self._size_of(items[0])):
            return False
        self.put_unbounded(*items)
        return True

    def put_unbounded(self, *items: ItemT) -> None:
        """Append items even if the queue is full. Callers must limit the items in another way, for
        example by reading no more input while `is_full` is true. After `close` the items are
        dropped.
        """
        if self._error is not None:
            return
        self._items.extend(items)
        self._size += sum(map(self._size_of, items))
        for _ in items:
            _wake(self._getters)

    async def get(self) -> ItemT:
        """Wait until the queue has an item, then remove and return the oldest one. Raises the error
        given to `close` if the queue is closed and empty.
        """
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
        """Remove and return the oldest items without waiting: at most `max_items` items with a
        total size of at most `max_size`, but always at least one if the queue is not empty.

        Raises the error given to `close` if the queue is closed and empty.
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
        """Remove and return all items without waiting. Never raises."""
        taken = list(self._items)
        self._items.clear()
        self._size = 0
        _wake(self._putters)
        return taken

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the queue has an item or is closed. Return False if `timeout_s` seconds passed
        first.
        """
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
        """Refuse further items and wake all waiting tasks. With `discard` the remaining items are
        dropped. Only the error of the first call is kept.
        """
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
