"""Command-line flags for device placement of models and drafters, shared by the commands."""

from __future__ import annotations

import argparse
from typing import TypedDict

from outrider.client.flags import integer_at_least
from outrider.client.local.config import CPU, DEVICES, PLACEMENTS, SEPARATE
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, ON


class PlacementOptions(TypedDict):
    """The fields of `LocalFleetConfig` that these flags set."""

    device: str
    drafter_device: str
    placement: str
    device_exchange: str
    draft_length: int | None
    draft_top_k: int | None
    cuda_graphs: bool
    busy_polling_cores: int | None
    simulated_acceptance: str


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    add("--device", choices=DEVICES, help="of target and draft models; default: cpu")
    add(
        "--drafter-device",
        metavar="DEVICE",
        help="of the drafters; default: GPUs of their own where there are enough",
    )
    add(
        "--placement",
        choices=PLACEMENTS,
        help="where the head drafts: a drafter (default), or the verifier",
    )
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="whether verifier and separate drafter exchange between their devices; default: auto, "
        "which is on where each has a GPU of its own",
    )
    add(
        "--draft-length",
        type=integer_at_least(1),
        metavar="K",
        help="of a head in the verifier, or of a drafter that exchanges between devices",
    )
    add("--no-cuda-graphs", action="store_true", help="launch kernels one by one (debugging)")
    add(
        "--busy-polling-cores",
        type=integer_at_least(0),
        metavar="N",
        help="that each model process keeps awake",
    )
    add(
        "--simulated-acceptance",
        metavar="MEAN|R1,R2,...",
        help="random weights only: drafts are accepted by chance",
    )


def placement_of(args: argparse.Namespace) -> PlacementOptions:
    """What the flags say."""
    return {
        "device": args.device or CPU,
        "drafter_device": args.drafter_device or "",
        "placement": args.placement or SEPARATE,
        "device_exchange": args.device_exchange or AUTO,
        "draft_length": args.draft_length,
        # What else it means is for each command to say, so not all have the flag.
        "draft_top_k": getattr(args, "draft_top_k", None),
        "cuda_graphs": not args.no_cuda_graphs,
        "busy_polling_cores": args.busy_polling_cores,
        "simulated_acceptance": args.simulated_acceptance or "",
    }
