"""Ordered send queue of a connection, for code that cannot wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from outrider.transport.interface import ExchangeConnection
from outrider.wire.limits import MAX_BUNDLE_BYTES

SendT = TypeVar("SendT")


class SendQueue(Generic[SendT]):
    """Sends messages immediately while the connection has space, and otherwise queues them for
    `run_sender`. The queue is not bounded: its owner must check `len` or `size`."""

    def __init__(
        self,
        connection: ExchangeConnection[SendT, Any],
        *,
        size_of: Callable[[SendT], int] = lambda _: 0,
    ) -> None:
        self._connection = connection
        self._size_of = size_of
        self._queue: deque[SendT] = deque()
        self._sending = False
        self._wake = asyncio.Event()
        self.size = 0
        """Total size of the queued messages, in the unit of `size_of`."""

    def __len__(self) -> int:
        return len(self._queue)

    def put_messages(self, *messages: SendT) -> None:
        """Send messages, or queue them for `run_sender`, in order. Messages that are sent
        immediately share frames. Raises ConnectionLostError."""
        for group in self._groups(messages):
            if self._queue or self._sending or not self._connection.try_send(*group):
                self._queue.extend(group)
                self.size += sum(map(self._size_of, group))
                self._wake.set()

    def _groups(self, messages: Sequence[SendT]) -> Iterator[Sequence[SendT]]:
        """Split messages into groups that each fit into one frame. A connection accepts either all
        messages of a group or none. All waiting messages are therefore in this queue, whose size is
        known."""
        first = size = 0
        for place, message in enumerate(messages):
            needs = self._size_of(message)
            if place > first and size + needs > MAX_BUNDLE_BYTES:
                yield messages[first:place]
                first, size = place, 0
            size += needs
        if messages:
            yield messages[first:]

    def drop_oldest(self) -> None:
        """Drop the message that was queued first."""
        self.size -= self._size_of(self._queue.popleft())

    async def run_sender(self) -> None:
        """Send queued messages until the connection is lost, then raise ConnectionLostError."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                message = self._queue[0]
                self.drop_oldest()
                self._sending = True
                await self._connection.send(message)
                self._sending = False
