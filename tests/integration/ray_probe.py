"""What a cluster says of its placement groups: `python -m tests.integration.ray_probe ADDRESS`.

Prints one JSON object. With `share` as a second argument it also reserves places for two actors
that compute on GPUs, and says which it got.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import ray
from outrider_ray.config import RayFleetConfig
from outrider_ray.placement import ActorPlacement, with_gpu_share
from ray.util import list_named_actors, placement_group_table

from outrider.spec.plan import DraftMethod


def groups() -> list[dict[str, Any]]:
    """Placement groups that stand, of all namespaces."""
    table = placement_group_table().values()
    return [group for group in table if group["state"] != "REMOVED"]


async def shared() -> dict[str, Any]:
    """The group of two actors that compute on GPUs."""
    methods = (DraftMethod.EAGLE3,)
    config = with_gpu_share(RayFleetConfig(model="m", head="h", methods=methods, device="cuda"))
    places = ActorPlacement(config)
    await places.reserve(config.cells)
    (group,) = (group for group in groups() if "GPU" in group["bundles"][0])
    await places.release()
    return group


def main() -> None:
    """Connect, look, print."""
    ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
    found: dict[str, Any] = {"actors": list_named_actors(all_namespaces=True), "groups": groups()}
    if "share" in sys.argv[2:]:
        found["shared"] = asyncio.run(shared())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
