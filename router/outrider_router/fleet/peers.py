"""When the router looks at its peers, and how long they may take to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from outrider_router.fleet.compatibility import PeerState

LOST_INTERVAL_S = 0.1
"""Time between two looks at a peer that is not healthy, at most: it may have come back."""
_TICKS = 8
"""Steps in which the silence of a peer is counted."""


@dataclass(slots=True, kw_only=True, eq=False)
class PeerStatus:
    """What the router knows of one process."""

    address: str
    state: PeerState = PeerState.UNKNOWN
    silent_s: float = 0.0
    """Time without a sign of life, as far as this router was awake to see one."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have the next look begin at once."""
    failures: int = 0
    problem: str = ""
    """Why the last look failed; logged when it changes."""

    def pass_time(self, seconds: float) -> None:
        """Count time of this event loop without a sign of life."""
        self.silent_s += seconds


async def poll_peer(
    peer: PeerStatus, look: Callable[[], Awaitable[None]], silence_s: float
) -> None:
    """Look at a peer. Raises TimeoutError after a silence, and what the look raises.

    Silence is counted in steps of this event loop, so that one which was held up (a stopped
    process, a machine without time for it) takes nobody for lost whose answer it has not read.
    """
    task = asyncio.ensure_future(look())
    try:
        for _ in range(_TICKS):
            done, _pending = await asyncio.wait((task,), timeout=silence_s / _TICKS)
            if done:
                return await task
            peer.pass_time(silence_s / _TICKS)
        raise TimeoutError
    finally:
        task.cancel()


async def wait_next_poll(peer: PeerStatus, interval_s: float) -> None:
    """Wait for the next look, which is due sooner at a peer that is not healthy."""
    if peer.state is not PeerState.HEALTHY:
        interval_s = min(interval_s, LOST_INTERVAL_S)
    try:
        async with asyncio.timeout(interval_s):
            await peer.woken.wait()
    except TimeoutError:
        peer.pass_time(interval_s)
    peer.woken.clear()
