"""Ray flags of `outrider serve`, passed on to the Ray launcher."""

from __future__ import annotations

import argparse

from outrider.client.local.config import DEVICES
from outrider.errors import InvalidRequestError
from outrider.transport.ray import EXCHANGES

STRATEGIES = PACK, SPREAD, STRICT_PACK, STRICT_SPREAD = (
    "pack",
    "spread",
    "strict-pack",
    "strict-spread",
)
"""Ray's ways of placing a group: on few nodes or on many; strict ones on one, or on one each."""


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument_group("with --runtime ray").add_argument
    add("--ray-address", metavar="ADDR", help="cluster to join, HOST:PORT or auto; default: none")
    add("--ray-strategy", choices=STRATEGIES, help="how two actors are placed; default: pack")
    add("--ray-exchange", choices=EXCHANGES, help="gRPC (default), or calls with object refs")
    add("--ray-gpus-per-actor", type=float, metavar="N", help="default: one, or an equal share")
    add("--ray-cpus-per-actor", type=float, metavar="N", help="default: none are reserved")


def ray_flags(args: argparse.Namespace) -> list[str]:
    """The launcher's flags for those that are given.

    Raises InvalidRequestError for flags that mean nothing to the runtime.
    """
    values = {
        "ray-address": args.ray_address,
        "strategy": args.ray_strategy,
        "exchange": args.ray_exchange,
        "gpus-per-actor": args.ray_gpus_per_actor,
        "cpus-per-actor": args.ray_cpus_per_actor,
    }
    given = {name: str(value) for name, value in values.items() if value is not None}
    if args.runtime != "ray" and given:
        raise InvalidRequestError(
            "flags like --ray-address and --ray-exchange need --runtime ray", reason="INVALID_FLAG"
        )
    if args.runtime == "ray" and args.drafter_device not in (None, *DEVICES):
        raise InvalidRequestError(
            f"--drafter-device: Ray chooses among GPUs, say {' or '.join(DEVICES)}",
            reason="INVALID_FLAG",
        )
    return [part for name, value in given.items() for part in (f"--{name}", value)]
