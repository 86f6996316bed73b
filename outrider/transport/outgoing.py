"""Messages from code that cannot wait, kept in order on their way into a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Generic, TypeVar

from outrider.transport.base import Connection

SendT = TypeVar("SendT")


class Outgoing(Generic[SendT]):
    """Hands a message to the connection at once while that has room, else to a queue that `pump`
    empties. The owner bounds the queue."""

    def __init__(self, connection: Connection[SendT, Any]) -> None:
        self._connection = connection
        self.queue: deque[SendT] = deque()
        """Messages that have found no room yet."""
        self._sending = False
        self._wake = asyncio.Event()

    def put(self, message: SendT) -> None:
        """Send or queue a message. Raises ConnectionLostError."""
        if self.queue or self._sending or not self._connection.offer(message):
            self.queue.append(message)
            self._wake.set()

    async def pump(self) -> None:
        """Send what is queued until the connection is lost, then raise ConnectionLostError."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.queue:
                self._sending = True
                await self._connection.send(self.queue.popleft())
                self._sending = False
