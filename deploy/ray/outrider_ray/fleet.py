"""Actors of one fleet: placement, restart, adding and removing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from outrider.errors import AlreadyExistsError, FailedPreconditionError
from outrider.transport.ray import (
    ActorLocation,
    EndpointFactory,
    RayEndpoint,
    Supervision,
    claim_endpoint,
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

    def __init__(self, config: RayFleetConfig, supervision: Supervision) -> None:
        """Create a fleet without starting it. Ray must have been initialised. `supervision` says
        who else may take the actors over, and when they end without a supervisor.

        Raises InvalidRequestError if the configuration of an actor is invalid, and UnavailableError
        if an actor needs a GPU and there is none.
        """
        self._config = config = with_gpu_share(config)
        self._supervision = supervision
        self._places = ActorPlacement(config)
        self._keepers = {member: self._keeper(member) for member in config.members}

    @property
    def members(self) -> dict[FleetMember, ActorLocation | None]:
        """Location of each actor; None while the actor is being created or replaced."""
        return {member: keeper.where for member, keeper in self._keepers.items()}

    @property
    def is_taken_over(self) -> bool:
        """Whether another supervisor has taken over any of the actors."""
        return any(keeper.is_taken_over for keeper in self._keepers.values())

    async def start(self) -> None:
        """Reserve placement groups, start all actors in parallel, and wait until all are ready.
        Raises AlreadyExistsError (NAME_IN_USE) if the namespace has actors of another fleet."""
        if not self._config.detached:
            await asyncio.to_thread(check_namespace, self._config.namespace)
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
        """Stop all actors, then release their placement groups, unless another supervisor has taken
        them over."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))
        if not self.is_taken_over:
            await self._places.release()

    def _keeper(self, member: FleetMember) -> ActorKeeper:
        """Return the keeper of a member. Raises InvalidRequestError for an invalid
        configuration."""
        config = self._config
        if member.role is MemberRole.VERIFIER:
            verifier = partial(verifier_endpoint, verifier_config(config, member.index), config.ray)
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
            found = await claim_endpoint(member.name, config.ray, self._supervision)
            if found is not None:
                return found
            options |= {"lifetime": "detached"}
        return await serve(
            member.name,
            factory,
            config=config.ray,
            actor_options=options,
            supervision=self._supervision,
        )


def existing_members(namespace: str) -> list[FleetMember]:
    """Return the members whose actors exist in this Ray namespace, sorted."""
    from ray.util import list_named_actors

    known: Any = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in known if actor["namespace"] == namespace]
    return sorted(member for name in names if (member := member_of(name)) is not None)


def check_namespace(namespace: str) -> None:
    """Raise AlreadyExistsError (NAME_IN_USE) if there are actors of a fleet in this namespace."""
    found = existing_members(namespace)
    if found:
        raise namespace_in_use(namespace, found)


def namespace_in_use(namespace: str, members: Sequence[FleetMember] = ()) -> AlreadyExistsError:
    """Return the error for a namespace that already has a fleet, of which `members` are known."""
    names = ", ".join(member.name for member in members)
    return AlreadyExistsError(
        f"the Ray namespace {namespace} already has a fleet{f' ({names})' if names else ''}: give "
        "another --namespace, or stop that fleet with its launcher or `outrider ray stop`",
        reason="NAME_IN_USE",
    )


async def claim_members(config: RayFleetConfig, supervision: Supervision) -> bool:
    """Take over the running actors of a fleet, and return whether there is a verifier among them.

    Raises AlreadyExistsError (NAME_IN_USE) if the namespace has actors of another fleet.
    """
    members = await asyncio.to_thread(existing_members, config.namespace)
    found = await asyncio.gather(
        *(claim_endpoint(member.name, config.ray, supervision) for member in members)
    )
    return any(
        endpoint is not None and member.role is MemberRole.VERIFIER
        for member, endpoint in zip(members, found, strict=True)
    )
