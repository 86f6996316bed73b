"""Rebalancer: moves running sessions off drafters that are lost, leaving or overloaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from outrider.ids import DrafterId
from outrider.spec.plan import DraftMethod
from outrider.wire.pool_codec import RemovedDrafter
from outrider_router.base.metrics import RouterMetrics
from outrider_router.config import RouterConfig
from outrider_router.fleet.drafter_assignment import (
    Candidates,
    DrafterLoads,
    MoveSession,
    SessionDrafter,
    SessionPlacement,
    plan_moves,
)
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer
from outrider_router.fleet.registry import PeerRegistry
from outrider_router.requests.running_requests import RequestEntry, RequestSession, RunningRequests

logger = logging.getLogger(__name__)

MAX_REATTACHED = 32
"""Largest number of sessions of lost, quarantined or leaving drafters that get a new drafter in one
check. It is limited because the new drafter must receive each session's whole prefix.
"""
MAX_BALANCE_MOVES = 4
"""Largest number of sessions that are moved for balance in one check."""
MIN_MOVE_INTERVAL_S = 5.0
"""Shortest time between two moves of a session for balance, in seconds."""
MAX_REFUSED_MOVES = 3
"""Number of refused moves after which a session is not moved to another drafter any more."""
MIN_CHECK_INTERVAL_S = 0.05
"""Shortest time between two checks, in seconds."""


class DrafterRebalancer:
    """Moves sessions between drafters, at intervals and when it is woken. Use from one event
    loop.
    """

    def __init__(
        self,
        config: RouterConfig,
        running_requests: RunningRequests,
        registry: PeerRegistry,
        metrics: RouterMetrics,
        *,
        wakeup: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        """Create a rebalancer that does not run yet. `wakeup` is set by others when sessions may
        have to move; the rebalancer clears it. `clock` returns monotonic seconds.
        """
        self._running_requests = running_requests
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self._interval_s = config.poll_interval_s
        """Time in seconds between two checks if nothing wakes the rebalancer earlier."""
        self._wakeup = wakeup
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the checks."""
        self._task = asyncio.create_task(self._run(), name="moving")

    async def stop(self) -> None:
        """Stop the checks."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake_up(self) -> None:
        """Run the next check soon, because a drafter was lost or is about to leave."""
        self._wakeup.set()

    def choose_drafter(self, peer: VerifierPeer, method: DraftMethod) -> DrafterId | None:
        """Choose the drafter of a session that is about to be opened on this verifier. Returns None
        if no drafter is available. The session then decodes without speculation until it gets one.
        """
        assert peer.info is not None
        here = self._registry.candidates_for(peer)
        if not here:
            return None
        held = (
            SessionDrafter(session.verifier_id, session.drafter.next_drafter_id)
            for _, session, _ in self._drafted_sessions()
        )
        loads = DrafterLoads(held, self._registry.other_router_sessions)
        return loads.choose_drafter(here, peer.info.verifier_id, method)

    async def drain_drafter(self, peer: DrafterPeer, timeout_s: float) -> RemovedDrafter:
        """Give a drafter no more sessions, and move its sessions to others within `timeout_s`
        seconds. Return how many sessions moved and how many remain.
        """
        await self._registry.drain_drafter(peer)
        if peer.info is None:
            return RemovedDrafter(0, 0)
        drafter_id = peer.info.drafter_id
        mine = [entry for entry in self._running_requests if _drafter_of(entry) == drafter_id]
        end = self._clock() + timeout_s
        while self._clock() < end:
            moved = self.rebalance_now()
            if not moved and not any(_is_with(entry, drafter_id, moving=True) for entry in mine):
                break
            await asyncio.sleep(MIN_CHECK_INTERVAL_S)
        left = sum(_is_with(entry, drafter_id) for entry in mine)
        gone = sum(_drafter_of(entry) not in (None, drafter_id) for entry in mine)
        return RemovedDrafter(num_moved=gone, num_remaining=left)

    def rebalance_now(self) -> int:
        """Move the sessions that should move now and return their number."""
        candidates: Candidates = self._registry.candidates()
        moves = plan_moves(
            self._sessions(),
            candidates,
            others=self._registry.other_router_sessions,
            max_homeless=MAX_REATTACHED,
            max_balanced=MAX_BALANCE_MOVES,
        )
        for move in moves:
            self._perform(move)
        return len(moves)

    def _perform(self, move: MoveSession) -> None:
        entry = self._running_requests.get_entry(move.request_id)
        session = None if entry is None else entry.open_session
        assert session is not None, "nothing has happened since the move was planned"
        self._metrics.session_moves.labels(move.reason).inc()
        logger.info(
            "session moved",
            extra={
                "request_id": move.request_id,
                "drafter_id": session.drafter.drafter_id,
                "to": move.drafter_id,
                "why": move.reason.value,
            },
        )
        session.move_to_drafter(move.drafter_id, self._clock())

    def _sessions(self) -> list[SessionPlacement]:
        rested = self._clock() - MIN_MOVE_INTERVAL_S
        return [
            SessionPlacement(
                request_id=entry.request_id,
                verifier_id=session.verifier_id,
                method=method,
                drafter_id=session.drafter.next_drafter_id,
                tokens=session.prompt_tokens + len(entry.output.token_ids),
                is_movable=entry.output.first_token_at is not None
                and session.drafter.moving_to is None
                and session.drafter.last_move_at <= rested,
                is_fixed=session.drafter.refused_moves >= MAX_REFUSED_MOVES,
            )
            for entry, session, method in self._drafted_sessions()
        ]

    def _drafted_sessions(self) -> Iterator[tuple[RequestEntry, RequestSession, DraftMethod]]:
        """Yield the running sessions that need a drafter, with their request and draft method."""
        for entry in self._running_requests:
            session = entry.open_session
            if session is not None and session.drafter.method is not None:
                yield entry, session, session.drafter.method

    async def _run(self) -> None:
        while True:
            try:
                self.rebalance_now()
            except Exception:
                logger.exception("session rebalancing failed")
            await asyncio.sleep(MIN_CHECK_INTERVAL_S)
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()


def _drafter_of(entry: RequestEntry) -> DrafterId | None:
    """Return the drafter of a request's running session, or None."""
    return None if entry.drafter is None else entry.drafter.drafter_id


def _is_with(entry: RequestEntry, drafter_id: DrafterId, *, moving: bool = False) -> bool:
    """Return whether the request's running session has this drafter. With `moving`, a move to
    another drafter must also be pending.
    """
    drafter = entry.drafter
    return (
        drafter is not None
        and drafter.drafter_id == drafter_id
        and (drafter.moving_to is not None or not moving)
    )
