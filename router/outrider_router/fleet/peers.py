"""Peer records of the router: state of each verifier and drafter, and when it is polled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.ids import DrafterId
from outrider.transport.interface import DrafterControl, VerifierControl
from outrider.wire.messages import DrafterInfo, VerifierInfo
from outrider_router.fleet.compatibility import PeerState

LOST_INTERVAL_S = 0.1
"""Time between two looks at a peer that is not healthy, at most: it may have come back."""
_TICKS = 8
"""Steps in which the silence of a peer is counted."""


class VerifierProgress(NamedTuple):
    """Progress mark of a verifier; it differs as soon as the verifier makes progress."""

    incarnation: str
    engine_steps: int

    @classmethod
    def of(cls, info: VerifierInfo) -> VerifierProgress:
        """What `info` says."""
        return cls(info.incarnation, info.engine_steps)


@dataclass(slots=True, kw_only=True, eq=False)
class PeerStatus:
    """The router's state of one peer process."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class VerifierPeer(PeerStatus):
    """A verifier."""

    control: VerifierControl | None = None
    info: VerifierInfo | None = None
    detached: set[DrafterId] = field(default_factory=set)
    """Drafters that sessions reported lost since the last look."""
    losses: int = 0
    """How often it was lost; tells an answer from before a loss."""
    open_sessions: int = 0
    """Sessions that this router has open on it."""
    stalled_s: float = 0.0
    """Time with open sessions in which it made no progress, as far as this router was awake."""
    stalled_at: VerifierProgress | None = None
    """Where it stood when it was lost because it made no progress; None: it was not."""

    def pass_time(self, seconds: float) -> None:
        """Count time of this event loop without a sign of life, or of progress."""
        # Named, for a class with slots that is made anew has no argument-free super().
        PeerStatus.pass_time(self, seconds)
        if self.open_sessions:
            self.stalled_s += seconds


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterPeer(PeerStatus):
    """A drafter."""

    control: DrafterControl | None = None
    info: DrafterInfo | None = None
    is_serving: bool = False
    """Whether it was reachable and attached to a healthy verifier at the last look."""
    misfits: set[str] = field(default_factory=set)
    """Verifiers that it cannot serve, by address."""
    is_draining: bool = False
    """Whether it is being removed: it is attached to no more verifiers, and gets no sessions."""
    is_recalled: bool = False
    """Whether it is to be told that it stays: an operator has added it."""
    recent_other_sessions: tuple[int, int] = (0, 0)
    """Sessions beyond those that this router placed, at the last two looks."""

    @property
    def is_leaving(self) -> bool:
        """Whether it is being removed, or has said that it is about to stop."""
        return self.is_draining or (self.info is not None and self.info.draining)

    @property
    def other_router_sessions(self) -> int:
        """Sessions that it follows for other routers; one look alone may see those of this one
        that have just ended."""
        return min(self.recent_other_sessions)


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
