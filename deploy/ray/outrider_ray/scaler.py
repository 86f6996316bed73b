"""Scaler: carries out the decisions of `autoscale.plan_scaling` and informs the router."""

from __future__ import annotations

import asyncio
import logging
import time

from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer
from outrider_router.requests.service import RouterService

from outrider.errors import OutriderError
from outrider_ray.autoscale import (
    Action,
    AutoscaleConfig,
    Create,
    MemberLoad,
    Memories,
    PoolState,
    plan_scaling,
)
from outrider_ray.config import RayFleetConfig
from outrider_ray.fleet import ActorFleet
from outrider_ray.members import FleetMember, MemberRole

logger = logging.getLogger(__name__)


class FleetScaler:
    """Keeps the number of verifiers and drafters of one fleet as the autoscaling policy decides."""

    def __init__(self, config: RayFleetConfig, fleet: ActorFleet, service: RouterService) -> None:
        self._config = config
        self._fleet = fleet
        self._service = service
        self._memories = Memories()
        self._leaving: set[FleetMember] = set()
        self._coming: set[FleetMember] = set()
        self._changes: dict[MemberRole, asyncio.Task[None]] = {}

    def introduce(self) -> None:
        """Add to the router the members of a resumed fleet that are not in its configuration,
        because an earlier supervisor had added them."""
        for member in set(self._fleet.members) - set(self._config.members):
            self._introduce(member)

    async def run(self) -> None:
        """Evaluate the load repeatedly and scale, until cancelled or until another supervisor has
        taken the fleet over. Returns at once if no pool may grow."""
        if self._config.max_of == self._config.counts:
            return
        try:
            while not self._fleet.is_taken_over:
                self.look(time.monotonic())
                await asyncio.sleep(self._config.autoscale.look_s)
        finally:
            for task in self._changes.values():
                task.cancel()
            await asyncio.gather(*self._changes.values(), return_exceptions=True)

    def look(self, now: float) -> tuple[Action, ...]:
        """Evaluate the load once, start the necessary changes, and return them. `now` is the
        monotonic time in seconds."""
        autoscale = self._config.autoscale
        self._memories.note(self._pools(), autoscale, now)
        begun = []
        for role, pool in self._pools().items():
            running = self._changes.get(role)
            if running is not None and not running.done():
                continue
            action = plan_scaling(pool, autoscale, now)
            if action is not None:
                self._memories.changed(role, now)
                self._changes[role] = asyncio.create_task(self._perform(action))
                begun.append(action)
        return tuple(begun)

    def _pools(self) -> dict[MemberRole, PoolState]:
        return {role: self._pool(role) for role in self._config.roles}

    def _pool(self, role: MemberRole) -> PoolState:
        memory = self._memories.of[role]
        known = set(self._fleet.members) | self._coming
        members = sorted(member for member in known if member.role is role)
        return PoolState(
            role=role,
            min_members=self._config.counts[role],
            max_members=self._config.max_of[role],
            members=tuple(self._load(member) for member in members),
            # Only more verifiers make the queue shorter.
            waiting=self._service.admission.num_waiting if role is MemberRole.VERIFIER else 0,
            hot_since=memory.hot_since,
            cold_since=memory.cold_since,
            changed_at=memory.changed_at,
        )

    def _load(self, member: FleetMember) -> MemberLoad:
        registry, leaving = self._service.registry, member in self._leaving
        if member.role is MemberRole.VERIFIER:
            verifier = registry.verifiers.get(member.name)
            return verifier_load(member, verifier, leaving=leaving)
        drafter = registry.drafters.get(member.name)
        return drafter_load(member, drafter, self._config.autoscale, leaving=leaving)

    async def _perform(self, action: Action) -> None:
        facts = {"actor": action.member.name}
        what = "scale-up" if isinstance(action, Create) else "scale-down"
        logger.info("%s started", what, extra=facts)
        try:
            await (self._create if isinstance(action, Create) else self._drain)(action.member)
        except OutriderError as error:
            # One such error is a lack of resources; the change is tried again after the
            # cool-down.
            logger.warning("%s failed", what, extra=facts | {"problem": error.message})
        else:
            self._memories.changed(action.member.role, time.monotonic())

    async def _create(self, member: FleetMember) -> None:
        self._coming.add(member)
        try:
            await self._fleet.add(member)
        finally:
            self._coming.discard(member)
        self._introduce(member)

    def _introduce(self, member: FleetMember) -> None:
        registry = self._service.registry
        add = registry.add_verifier if member.role is MemberRole.VERIFIER else registry.add_drafter
        add(member.name)

    async def _drain(self, member: FleetMember) -> None:
        self._leaving.add(member)
        try:
            await self._release(member)
        finally:
            self._leaving.discard(member)

    async def _release(self, member: FleetMember) -> None:
        registry, drain_timeout_s = self._service.registry, self._config.autoscale.drain_timeout_s
        if member.role is MemberRole.VERIFIER:
            await self._fleet.remove(member, drain_timeout_s)
            gone = registry.verifiers.get(member.name)
            if gone is not None:
                await registry.forget_verifier(gone)
            return
        peer = registry.drafters.get(member.name)
        if peer is not None:
            await self._service.mover.drain_drafter(peer, drain_timeout_s)
            await registry.forget_drafter(peer)
        await self._fleet.remove(member, drain_timeout_s)


def verifier_load(
    member: FleetMember, peer: VerifierPeer | None, *, leaving: bool = False
) -> MemberLoad:
    """Return a verifier's load as the router knows it: the used share of its sessions or of its KV
    blocks, whichever is larger. `leaving` says whether the verifier is being removed."""
    info = None if peer is None else peer.info
    if peer is None or info is None or peer.state is not PeerState.HEALTHY:
        return MemberLoad(member=member, ready=False, leaving=leaving)
    blocks = max(1, info.kv_total_blocks)
    places = info.sessions / info.max_sessions if info.max_sessions else 0.0
    load = max(places, 1.0 - info.kv_free_blocks / blocks)
    return MemberLoad(member=member, sessions=info.sessions, load=load, leaving=leaving)


def drafter_load(
    member: FleetMember, peer: DrafterPeer | None, config: AutoscaleConfig, *, leaving: bool = False
) -> MemberLoad:
    """Return a drafter's load as the router knows it: its number of sessions, divided by the number
    at which it counts as full. `leaving` says whether the drafter is being removed."""
    info = None if peer is None else peer.info
    if peer is None or info is None or peer.state is not PeerState.HEALTHY:
        return MemberLoad(member=member, ready=False, leaving=leaving)
    full = min(config.sessions_per_drafter, info.max_sessions or config.sessions_per_drafter)
    load = info.sessions / full
    return MemberLoad(member=member, sessions=info.sessions, load=load, leaving=leaving)
