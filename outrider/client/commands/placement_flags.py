"""Command-line flags for the placement of models and drafters on devices, shared by several
commands."""

from __future__ import annotations

import argparse
from typing import TypedDict

from outrider.client.flags import integer_at_least
from outrider.client.local.config import CPU, DEVICES, PLACEMENTS, SEPARATE
from outrider.client.local.model_files import DEFAULT_MODEL
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, ON

MODEL_HELP = (
    "Target model: known name, directory, .gguf file, or OWNER/NAME on the Hugging Face hub "
    f"(default: {DEFAULT_MODEL})."
)
HEAD_HELP = "Draft head (default: the head that ships for the model, if there is one)."
DTYPE_HELP = "Data type of the models (default: bfloat16 on GPUs, float32 on CPUs)."
DEVICE_HELP = "Device on which the target and draft models compute (default: cpu)."


class PlacementOptions(TypedDict):
    """Those fields of `LocalFleetConfig` that the placement flags set."""

    device: str
    drafter_device: str
    placement: str
    device_exchange: str
    draft_length: int | None
    draft_top_k: int | None
    cuda_graphs: bool
    batch_invariant: bool
    busy_polling_cores: int | None
    simulated_acceptance: str


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the placement flags to a parser."""
    add = parser.add_argument
    add("--device", choices=DEVICES, help=DEVICE_HELP)
    add(
        "--drafter-device",
        metavar="DEVICE",
        help="Device on which the drafters compute (default: separate GPUs if there are enough).",
    )
    add(
        "--placement",
        choices=PLACEMENTS,
        help="Process in which the draft head runs: separate (the drafter), colocated or fused "
        "(the verifier) (default: separate).",
    )
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="Whether a verifier and a separate drafter exchange drafts directly between their "
        "GPUs; auto: if each has its own GPU (default: auto).",
    )
    add(
        "--draft-length",
        type=integer_at_least(1),
        metavar="K",
        help="Draft tokens per round of a head in the verifier, or of a drafter with device "
        "exchange.",
    )
    add(
        "--no-cuda-graphs",
        action="store_true",
        help="Launch kernels one by one instead of replaying CUDA graphs, for debugging.",
    )
    add(
        "--batch-invariant",
        action="store_true",
        help="Compute the same bits for a token whatever runs beside it. Greedy and coupled output "
        "then does not depend on speculation or load.",
    )
    add(
        "--busy-polling-cores",
        type=integer_at_least(0),
        metavar="N",
        help="CPU cores that each model process keeps busy-polling to reduce wake-up latency.",
    )
    add(
        "--simulated-acceptance",
        metavar="MEAN|length:MEAN|R1,R2,...",
        help="Benchmark only: accept drafts at random at these rates, or so that rounds have this "
        "mean length; for models with random weights. Not with API keys.",
    )


def placement_of(args: argparse.Namespace) -> PlacementOptions:
    """Return the fields of `LocalFleetConfig` for the given placement flags."""
    return {
        "device": args.device or CPU,
        "drafter_device": args.drafter_device or "",
        "placement": args.placement or SEPARATE,
        "device_exchange": args.device_exchange or AUTO,
        "draft_length": args.draft_length,
        # Only some commands declare this flag, because its meaning depends on the command.
        "draft_top_k": getattr(args, "draft_top_k", None),
        "cuda_graphs": not args.no_cuda_graphs,
        "batch_invariant": args.batch_invariant,
        "busy_polling_cores": args.busy_polling_cores,
        "simulated_acceptance": args.simulated_acceptance or "",
    }
