"""Ray flags of `outrider serve`, which are passed to the Ray launcher."""

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
"""Placement strategies of Ray. PACK places actors on few nodes, SPREAD on many, STRICT_PACK on
exactly one, and STRICT_SPREAD each on a different node."""


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the Ray flags to a parser."""
    add = parser.add_argument_group("options of --runtime ray").add_argument
    add(
        "--ray-address",
        metavar="ADDR",
        help="Ray cluster to join, HOST:PORT or auto (default: start a local Ray).",
    )
    add(
        "--ray-strategy",
        choices=STRATEGIES,
        help="Placement strategy of a verifier and its drafters (default: pack).",
    )
    add(
        "--ray-exchange",
        choices=EXCHANGES,
        help="Transport between actors: gRPC, or actor calls with object refs (default: grpc).",
    )
    add(
        "--ray-gpus-per-actor",
        type=float,
        metavar="N",
        help="GPUs that Ray reserves for each actor on cuda (default: one, or an equal share if "
        "there are fewer GPUs than actors).",
    )
    add(
        "--ray-cpus-per-actor",
        type=float,
        metavar="N",
        help="CPUs that Ray reserves for each actor (default: 0).",
    )


def ray_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags of the Ray launcher for the given flags.

    Raises InvalidRequestError for flags that do not apply to the selected runtime.
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
        flags = ", ".join(f"--ray-{name.removeprefix('ray-')}" for name in given)
        raise InvalidRequestError(f"--runtime ray is needed for {flags}", reason="INVALID_FLAG")
    if args.runtime == "ray" and args.drafter_device not in (None, *DEVICES):
        raise InvalidRequestError(
            f"--drafter-device must be {' or '.join(DEVICES)} with --runtime ray, which "
            "chooses the GPU",
            reason="INVALID_FLAG",
        )
    return [part for name, value in given.items() for part in (f"--{name}", value)]
