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
"""Longest time between two polls of a peer that is not healthy, in seconds."""
_TICKS = 8
"""Number of steps in which one poll counts the time without an answer."""


class VerifierProgress(NamedTuple):
    """Progress counters of a verifier. Two reports of a verifier have equal counters only if the
    verifier made no progress between them.
    """

    incarnation: str
    engine_steps: int

    @classmethod
    def of(cls, info: VerifierInfo) -> VerifierProgress:
        """Return the progress counters in `info`."""
        return cls(info.incarnation, info.engine_steps)


@dataclass(slots=True, kw_only=True, eq=False)
class PeerStatus:
    """The router's state of one peer process."""

    address: str
    state: PeerState = PeerState.UNKNOWN
    silent_s: float = 0.0
    """Time without a sign of life in seconds. Only time in which this router's event loop ran
    counts.
    """
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that starts the next poll at once."""
    failures: int = 0
    problem: str = ""
    """Message of the last poll's error, which is logged only when it changes; empty after a
    success.
    """

    def pass_time(self, seconds: float) -> None:
        """Add `seconds` to the time without a sign of life."""
        self.silent_s += seconds


@dataclass(slots=True, kw_only=True, eq=False)
class VerifierPeer(PeerStatus):
    """The router's state of one verifier."""

    control: VerifierControl | None = None
    info: VerifierInfo | None = None
    detached: set[DrafterId] = field(default_factory=set)
    """Drafters that sessions reported lost since the last poll of the verifier."""
    losses: int = 0
    """Number of times that the verifier was lost. If it changes during a poll, the poll's answer is
    from before the loss.
    """
    open_sessions: int = 0
    """Number of open sessions of this router on the verifier."""
    stalled_s: float = 0.0
    """Time with open sessions and without progress in seconds. Only time in which this router's
    event loop ran counts.
    """
    stalled_at: VerifierProgress | None = None
    """Progress counters of the verifier when it was lost for lack of progress; None if it was
    not.
    """

    def pass_time(self, seconds: float) -> None:
        """Add `seconds` to the time without a sign of life. If the verifier has open sessions, add
        them to the time without progress too.
        """
        # super() without arguments fails here: dataclass(slots=True) creates a new class.
        PeerStatus.pass_time(self, seconds)
        if self.open_sessions:
            self.stalled_s += seconds


@dataclass(slots=True, kw_only=True, eq=False)
class DrafterPeer(PeerStatus):
    """The router's state of one drafter."""

    control: DrafterControl | None = None
    info: DrafterInfo | None = None
    is_serving: bool = False
    """Whether the drafter was reachable and attached to a healthy verifier at the last poll."""
    misfits: set[str] = field(default_factory=set)
    """Addresses of the verifiers that the drafter cannot serve."""
    is_draining: bool = False
    """Whether this router is removing the drafter, which then gets no new verifiers or sessions."""
    is_recalled: bool = False
    """Whether the drafter must be told to cancel a drain, because an operator has added it."""
    recent_other_sessions: tuple[int, int] = (0, 0)
    """Numbers of other routers' sessions at the last two polls."""

    @property
    def is_leaving(self) -> bool:
        """Whether the drafter is being removed or has announced that it will stop."""
        return self.is_draining or (self.info is not None and self.info.draining)

    @property
    def other_router_sessions(self) -> int:
        """Number of other routers' sessions. It is the smaller number of two polls, because one
        poll may include sessions of this router that have just ended.
        """
        return min(self.recent_other_sessions)


@dataclass(slots=True)
class DesiredPeers:
    """Counts the peers of one kind that should be healthy, as far as the router can know.

    The number is the largest number of peers that were healthy at the same time. A peer that stops
    after a drain lowers it by one, because its end was intended. A peer that is lost does not, even
    if DNS no longer has its address.
    """

    peak: int = 0
    """Largest number of healthy peers, without those that stopped after a drain."""

    def record_healthy(self, count: int) -> None:
        """Raise the number if `count` peers are healthy now."""
        self.peak = max(self.peak, count)

    def record_intended_end(self) -> None:
        """Lower the number, because a healthy peer stopped after a drain."""
        self.peak = max(0, self.peak - 1)

    def count(self, registered: int) -> int:
        """Return the number of peers that should be healthy, of which `registered` have an address
        now. A peer whose address is configured or in DNS should be healthy even if it never was.
        """
        return max(self.peak, registered)


async def poll_peer(
    peer: PeerStatus, look: Callable[[], Awaitable[None]], silence_s: float
) -> None:
    """Run `look`, one poll of a peer. Raises TimeoutError after `silence_s` seconds without an
    answer, and the errors of the poll.

    Silence is counted in steps of this event loop. So a router that was itself suspended or
    overloaded does not treat a peer as lost whose answer it has not read yet.
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
    """Wait until the next poll of a peer is due; peers that are not healthy are polled more
    often.
    """
    if peer.state is not PeerState.HEALTHY:
        interval_s = min(interval_s, LOST_INTERVAL_S)
    try:
        async with asyncio.timeout(interval_s):
            await peer.woken.wait()
    except TimeoutError:
        peer.pass_time(interval_s)
    peer.woken.clear()
