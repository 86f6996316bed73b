"""Actors of one fleet: placement, restart, adding and removing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from outrider.errors import FailedPreconditionError
from outrider.transport.ray import (
    ActorLocation,
    EndpointFactory,
    RayEndpoint,
    find_endpoint,
    serve_drafter,
    serve_verifier,
)
from outrider_ray.actor_keeper import ActorKeeper
from outrider_ray.actors import drafter_endpoint, verifier_endpoint
from outrider_ray.config import RayFleetConfig, drafter_config, verifier_config
from outrider_ray.members import FleetMember, MemberRole, member_of
from outrider_ray.placement import ActorPlacement, with_gpu_share

ServeActor = Callable[..., Awaitable[RayEndpoint]]
"""Function that starts an actor: `serve_verifier` or `serve_drafter`."""


class ActorFleet:
    """Places, keeps alive, adds and removes the actors of one fleet."""

    def __init__(self, config: RayFleetConfig) -> None:
        """Create a fleet without starting it. Ray must have been initialised.

        Raises InvalidRequestError if the configuration of an actor is invalid, and UnavailableError
        if an actor needs a GPU and there is none.
        """
        self._config = config = with_gpu_share(config)
        self._places = ActorPlacement(config)
        self._keepers = {member: self._keeper(member) for member in config.members}

    @property
    def members(self) -> dict[FleetMember, ActorLocation | None]:
        """Location of each actor; None while the actor is being created or replaced."""
        return {member: keeper.where for member, keeper in self._keepers.items()}

    async def start(self) -> None:
        """Reserve placement groups, start all actors in parallel, and wait until all are ready."""
        await self._places.reserve(self._config.cells)
        await asyncio.gather(*(keeper.start() for keeper in self._keepers.values()))
        for keeper in self._keepers.values():
            keeper.keep()

    async def resume(self) -> None:
        """Take over the actors of a detached fleet whose supervisor died. Missing actors are
        created in the background, as if they had just died."""
        grown = await asyncio.to_thread(existing_members, self._config.namespace)
        own = [member for member in grown if member not in self._keepers]
        self._keepers |= {member: self._keeper(member) for member in own}
        self._places.take((*self._config.cells, *((member,) for member in own)))
        for keeper in self._keepers.values():
            keeper.keep()

    async def detach(self) -> None:
        """Stop replacing the actors, which continue to run."""
        await asyncio.gather(*(keeper.detach() for keeper in self._keepers.values()))

    async def add(self, member: FleetMember) -> None:
        """Place and start one more actor. Raises UnavailableError, or the error of its endpoint."""
        if member in self._keepers:
            raise FailedPreconditionError(
                f"the actor {member.name} already exists", reason="MEMBER_EXISTS"
            )
        keeper = self._keepers[member] = self._keeper(member)
        try:
            await self._places.reserve([(member,)])
            await keeper.start()
        except BaseException:
            self._keepers.pop(member)
            await self._places.give_back(member)
            raise
        keeper.keep()

    async def remove(self, member: FleetMember, drain_timeout_s: float) -> None:
        """Remove an actor that `add` created. A verifier first hands over its sessions, within
        `drain_timeout_s` seconds."""
        keeper = self._keepers[member]
        # The router has already moved a drafter's sessions.
        await keeper.stop(drain_timeout_s if member.role is MemberRole.VERIFIER else 0.0)
        self._keepers.pop(member)
        await self._places.give_back(member)

    async def stop(self) -> None:
        """Stop all actors, then release their placement groups."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))
        await self._places.release()

    def _keeper(self, member: FleetMember) -> ActorKeeper:
        """Return the keeper of a member. Raises InvalidRequestError for an invalid
        configuration."""
        config = self._config
        if member.role is MemberRole.VERIFIER:
            verifier = partial(verifier_endpoint, verifier_config(config, member.index))
            return ActorKeeper(member.name, partial(self._serve, member, serve_verifier, verifier))
        own = drafter_config(config, member.index)
        assert own is not None, "there is no drafter without a configuration of one"
        drafter = partial(drafter_endpoint, own, config.ray)
        return ActorKeeper(member.name, partial(self._serve, member, serve_drafter, drafter))

    async def _serve(
        self, member: FleetMember, serve: ServeActor, factory: EndpointFactory
    ) -> RayEndpoint:
        config = self._config
        options = self._places.options(member)
        if config.detached:
            found = await find_endpoint(member.name, config.ray)
            if found is not None:
                return found
            options |= {"lifetime": "detached"}
        return await serve(member.name, factory, config=config.ray, actor_options=options)


def existing_members(namespace: str) -> list[FleetMember]:
    """Return the members whose actors exist in this Ray namespace, sorted."""
    from ray.util import list_named_actors

    known: Any = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in known if actor["namespace"] == namespace]
    return sorted(member for name in names if (member := member_of(name)) is not None)
