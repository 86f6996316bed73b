"""Arrival queue: admits one request per event-loop turn, so that bursts do not block the loop."""

from __future__ import annotations

import asyncio
from collections import deque


class ArrivalQueue:
    """Admits one request per turn of the event loop, first come, first served.

    Reading, checking and refusing a request take a millisecond or more. Two thousand that arrive
    together would hold up running streams and health for seconds; so they wait here, and the event
    loop serves everybody else between two of them. Use from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_free = True
        """Whether nobody has entered in this turn."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait_turn(self) -> None:
        """Wait for a turn; returns at once where nobody else is about to enter."""
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._pass_on)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            # One whose client has left is cancelled.
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_free = True
