"""Places for the actors: a placement group with a bundle for each, and shares of GPUs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.client.local import CUDA
from outrider.client.on_ray import STRICT_PACK, STRICT_SPREAD
from outrider.errors import UnavailableError
from outrider_ray.config import LaunchConfig, Role

logger = logging.getLogger(__name__)

GROUP = "outrider"
"""Name of the placement group, in the launcher's namespace."""
_LOOK_S = 1.0
_SLIVER = {"CPU": 0.001}
"""A bundle must hold something; this much is missed by nobody."""


def gpu_share(strategy: str, actors: int, gpus: Sequence[float]) -> float:
    """GPUs for each of `actors`, given those of every node: a whole one, or an equal share where
    there are fewer. Raises UnavailableError where there is none at all.
    """
    most = max(gpus, default=0.0) if strategy == STRICT_PACK else sum(gpus)
    if most <= 0.0:
        raise UnavailableError(
            "Ray has no GPU: for nodes that are still to come, say how much of one an actor gets",
            reason="NO_GPU",
        )
    # Actors that are kept apart share nothing with each other.
    return 1.0 if most >= actors or strategy == STRICT_SPREAD else most / actors


def with_gpu_share(config: LaunchConfig) -> LaunchConfig:
    """The configuration with `gpus_per_actor` resolved. Ray must be up. UnavailableError."""
    actors = config.devices.count(CUDA)
    if config.gpus_per_actor is not None or not actors:
        return config
    import ray

    nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    share = gpu_share(config.strategy, actors, nodes)
    if share < 1.0:
        facts = {"actors": actors, "gpus": sum(nodes), "gpus_per_actor": share}
        logger.warning("fewer GPUs than actors: they share", extra=facts)
    return replace(config, gpus_per_actor=share)


def bundle(config: LaunchConfig, role: Role) -> dict[str, float]:
    """What is reserved for an actor."""
    wanted = {"CPU": config.cpus_per_actor, "GPU": config.gpus_of(role)}
    if resource := config.resource_of(role):
        wanted[resource] = 1.0
    return {name: amount for name, amount in wanted.items() if amount > 0} or dict(_SLIVER)


class Places:
    """The placement group of one launcher; it ends with the launcher, however that ends."""

    def __init__(self, config: LaunchConfig) -> None:
        """`config` with its share of GPUs resolved."""
        self._config = config
        self._roles = config.roles
        self._group: Any = None

    async def reserve(self) -> None:
        """Reserve a bundle for each actor, all at once.

        Raises UnavailableError if there is no room for them within `start_timeout_s`.
        """
        from ray.util import placement_group, placement_group_table

        config = self._config
        bundles = [bundle(config, role) for role in self._roles]
        facts = {"strategy": config.strategy, "bundles": bundles}
        logger.info("reserving places", extra=facts)
        try:
            self._group = placement_group(bundles, strategy=config.ray_strategy, name=GROUP)
        except ValueError as error:
            raise UnavailableError(f"no places: {error}", reason="NO_PLACES") from error
        try:
            async with asyncio.timeout(config.start_timeout_s):
                # In short waits: a thread that waits cannot be cancelled.
                while not await asyncio.to_thread(self._group.wait, _LOOK_S):
                    continue
        except TimeoutError:
            raise UnavailableError(
                f"Ray found no {config.strategy} places for {bundles} within "
                f"{config.start_timeout_s:g} s",
                reason="NO_PLACES",
            ) from None
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        logger.info("places are reserved", extra={"nodes": [nodes[i] for i in range(len(bundles))]})

    def options(self, role: Role) -> dict[str, object]:
        """Ray's options for an actor in its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resource = self._config.resource_of(role)
        return {
            "num_cpus": self._config.cpus_per_actor,
            "num_gpus": self._config.gpus_of(role),
            "resources": {resource: 1.0} if resource else {},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._roles.index(role)
            ),
        }

    async def release(self) -> None:
        """Give the bundles back; idempotent."""
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)
