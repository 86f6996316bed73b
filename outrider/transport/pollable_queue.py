"""Queue whose consumer thread waits for items and sockets at the same time."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

SELECT_FDS: Final = 1024
"""Limit of `select`: file descriptors must be below this. For higher ones `poll` is used, whose
timeouts are rounded up to milliseconds."""
_MS: Final = 1000.0


class PollableQueue(Generic[ItemT]):
    """FIFO queue. Any thread may add items, but only one thread, the owner, may remove them."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._bell, self._ring = os.pipe()
        for end in (self._bell, self._ring):
            os.set_blocking(end, False)
        self._asleep = False
        """Whether the owner waits or is about to wait. The owner checks for items once more after
        setting this."""

    def __len__(self) -> int:
        return len(self._items)

    def __del__(self) -> None:
        for end in (self._bell, self._ring):
            with contextlib.suppress(OSError):
                os.close(end)

    def put_item(self, item: ItemT) -> None:
        """Append an item and wake the owner. May be called on any thread."""
        self._items.append(item)
        if self._asleep:
            # If the pipe is full, the owner wakes up anyway.
            with contextlib.suppress(BlockingIOError):
                os.write(self._ring, b"\0")

    def take_all(self) -> list[ItemT]:
        """Remove and return all queued items. Only for the owner's thread."""
        return [self._items.popleft() for _ in range(len(self._items))]

    def wait_ready(
        self,
        timeout_s: float | None,
        readers: Sequence[int] = (),
        writers: Sequence[int] = (),
    ) -> set[int]:
        """Wait until there is an item or one of these file descriptors is ready, at most
        `timeout_s` seconds (None for no limit).

        Returns the descriptors that can be read or written. Only for the owner's thread.
        """
        self._asleep = True
        try:
            if self._items:
                timeout_s = 0.0
            ready = _ready((self._bell, *readers), writers, timeout_s)
        finally:
            self._asleep = False
        if self._bell in ready:
            ready.discard(self._bell)
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 4096)
        return ready


def _ready(readers: Sequence[int], writers: Sequence[int], timeout_s: float | None) -> set[int]:
    if max((*readers, *writers)) < SELECT_FDS:
        read, written, _ = select.select(readers, writers, (), timeout_s)
        return {*read, *written}
    waiting = select.poll()
    for number in {*readers, *writers}:
        waiting.register(
            number,
            (select.POLLIN if number in readers else 0)
            | (select.POLLOUT if number in writers else 0),
        )
    return {number for number, _ in waiting.poll(None if timeout_s is None else timeout_s * _MS)}
