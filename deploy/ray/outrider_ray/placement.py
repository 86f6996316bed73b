"""Actor placement: placement groups with a bundle for each actor, and GPU shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.client.commands.ray_flags import PACK, STRICT_PACK, STRICT_SPREAD
from outrider.client.local.config import CUDA
from outrider.errors import UnavailableError
from outrider_ray.config import RayFleetConfig
from outrider_ray.members import FleetMember, MemberGroup, MemberRole, group_name

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_SLIVER = {"CPU": 0.001}
"""Resources of an actor that would otherwise reserve nothing. Ray refuses empty bundles, so such an
actor reserves a negligible amount."""


def gpu_share(strategy: str, actors: int, gpus: Sequence[float]) -> float:
    """Return the number of GPUs that each of `actors` actors reserves: one, or an equal share of
    the GPUs if there are fewer GPUs than actors.

    `gpus` is the number of GPUs of each node. With the placement strategy strict-pack only the node
    with the most GPUs counts, and with strict-spread the result is always one. Raises
    UnavailableError (NO_GPU) if there are no GPUs.
    """
    most = max(gpus, default=0.0) if strategy == STRICT_PACK else sum(gpus)
    if most <= 0.0:
        raise UnavailableError(
            "the Ray cluster has no GPU; if nodes with GPUs join later, set gpus_per_actor",
            reason="NO_GPU",
        )
    # Actors on different nodes cannot share a GPU.
    return 1.0 if most >= actors or strategy == STRICT_SPREAD else most / actors


def with_gpu_share(config: RayFleetConfig) -> RayFleetConfig:
    """Return the configuration with `gpus_per_actor` set by `gpu_share`, if it was not set and an
    actor needs a GPU. Ray must have been initialised. Raises UnavailableError (NO_GPU)."""
    counts = zip(config.devices, config.counts, strict=False)
    actors = sum(count for device, count in counts if device == CUDA)
    if config.gpus_per_actor is not None or not actors:
        return config
    import ray

    nodes = [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
    # Each cell may be on a different node, even if the actors of a cell are packed.
    strategy = config.strategy if len(config.cells) == 1 else PACK
    share = gpu_share(strategy, actors, nodes)
    if share < 1.0:
        facts = {"actors": actors, "gpus": sum(nodes), "gpus_per_actor": share}
        logger.warning("GPUs shared: there are fewer GPUs than actors", extra=facts)
    return replace(config, gpus_per_actor=share)


def actor_bundle(config: RayFleetConfig, role: MemberRole) -> dict[str, float]:
    """Return the resources that Ray reserves for an actor of this role."""
    wanted = {"CPU": config.cpus_per_actor, "GPU": config.gpus_of(role)}
    if resource := config.resource_of(role):
        wanted[resource] = 1.0
    return {name: amount for name, amount in wanted.items() if amount > 0} or dict(_SLIVER)


class ActorPlacement:
    """Placement groups of one fleet. They are removed when the launcher ends, unless the fleet is
    detached."""

    def __init__(self, config: RayFleetConfig) -> None:
        """Create an object without placement groups. `config` must have `gpus_per_actor` set, see
        `with_gpu_share`."""
        self._config = config
        self._groups: dict[MemberGroup, Any] = {}
        self._cells: dict[FleetMember, MemberGroup] = {}

    async def reserve(self, cells: Sequence[MemberGroup]) -> None:
        """Reserve a bundle for each member; the bundles of one cell are reserved together.

        Raises UnavailableError (NO_PLACES) if they cannot be placed within `start_timeout_s`.
        """
        self.take(cells)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await asyncio.gather(*(self._wait(cell) for cell in cells))
        except TimeoutError:
            raise UnavailableError(
                f"Ray could not place {_names(cells)} with strategy {self._config.strategy} within "
                f"{self._config.start_timeout_s:g} s",
                reason="NO_PLACES",
            ) from None

    def take(self, cells: Sequence[MemberGroup]) -> None:
        """Request the bundles of these cells without waiting until they are reserved. Each actor
        waits for its own bundle.

        Raises UnavailableError (NO_PLACES) for a request that Ray refuses.
        """
        for cell in cells:
            self._groups[cell] = self._group(cell)
            self._cells |= dict.fromkeys(cell, cell)

    def options(self, member: FleetMember) -> dict[str, object]:
        """Return the options with which Ray starts an actor in its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        role, cell = member.role, self._cells[member]
        resource = self._config.resource_of(role)
        return {
            "num_cpus": self._config.cpus_per_actor,
            "num_gpus": self._config.gpus_of(role),
            "resources": {resource: 1.0} if resource else {},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[cell], placement_group_bundle_index=cell.index(member)
            ),
        }

    async def give_back(self, member: FleetMember) -> None:
        """Release the bundle of a member that has a placement group of its own; idempotent."""
        from ray.util import remove_placement_group

        cell = self._cells.pop(member, ())
        group = self._groups.pop(cell, None) if cell == (member,) else None
        if group is not None:
            await asyncio.to_thread(remove_placement_group, group)

    async def release(self) -> None:
        """Release all bundles; idempotent."""
        from ray.util import remove_placement_group

        groups, self._groups = self._groups, {}
        self._cells.clear()
        for group in groups.values():
            await asyncio.to_thread(remove_placement_group, group)

    def _group(self, cell: MemberGroup) -> Any:
        """Return the placement group of a cell: that of a previous supervisor, or a new one."""
        from ray.util import get_placement_group, placement_group

        config, name = self._config, group_name(cell)
        if config.detached:
            with contextlib.suppress(ValueError):
                return get_placement_group(name)
        bundles = [actor_bundle(config, member.role) for member in cell]
        facts = {"group": name, "strategy": config.strategy, "bundles": bundles}
        logger.info("placement groups requested", extra=facts)
        lifetime = "detached" if config.detached else None
        try:
            return placement_group(
                bundles, strategy=config.ray_strategy, name=name, lifetime=lifetime
            )
        except ValueError as error:
            raise UnavailableError(
                f"Ray could not create placement groups: {error}", reason="NO_PLACES"
            ) from error

    async def _wait(self, cell: MemberGroup) -> None:
        from ray.util import placement_group_table

        group = self._groups[cell]
        # Wait in short steps, because a thread that waits cannot be cancelled.
        while not await asyncio.to_thread(group.wait, _LOOK_S):
            continue
        nodes = placement_group_table(group)["bundles_to_node_id"]
        where = {member.name: nodes[number] for number, member in enumerate(cell)}
        logger.info("placement groups reserved", extra={"nodes": where})


def _names(cells: Sequence[MemberGroup]) -> str:
    return ", ".join(member.name for cell in cells for member in cell)
