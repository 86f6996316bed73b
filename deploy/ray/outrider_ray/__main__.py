"""Command line of the launcher: `python -m outrider_ray`, or `outrider ray`.

Prints one line {"event": "ready", "address": "HOST:PORT"} on stdout when it serves; logs go to
stderr. `status`, `stop` and `node` as a first argument are separate commands. Heavy imports follow
the parsing of the flags, so that --help and usage errors return at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.config import comma_list, parse_config
from outrider.errors import OutriderError
from outrider.extras import explain_missing_packages
from outrider.logs import setup_logging
from outrider.process_tuning import run_event_loop, tune_garbage_collector
from outrider.spec.exchange_mode import EXCHANGE_MODES, ON
from outrider_ray.commands import NAMES, run_command
from outrider_ray.config import RayFleetConfig

if TYPE_CHECKING:
    from outrider_ray.embedded_router import EmbeddedRouter
    from outrider_ray.fleet import ActorFleet

_EXIT_MISUSE = 2


def parse_args(argv: Sequence[str] | None = None) -> RayFleetConfig:
    """Load the configuration from file, environment and flags. Raises InvalidRequestError."""
    return parse_config(RayFleetConfig, make_parser(), argv, "ray").config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Each flag is stored under the configuration key that
    it sets."""
    parser = argparse.ArgumentParser(
        prog="outrider ray",
        description="Serve a model with verifiers and drafters as Ray actors.",
        epilog="The first argument may be a command: status, stop or node. See `outrider ray "
        "status --help`.",
    )
    add = parser.add_argument
    add("--config", metavar="FILE.toml", help="TOML configuration file.")
    add("--model", metavar="NAME|DIR", help="Target model: a known name or a directory.")
    add("--model-name", metavar="NAME", help="Model name that clients send.")
    add("--head", metavar="DIR", help="Directory of the EAGLE draft head (default: auto).")
    add("--draft-model", metavar="NAME|DIR", help="Draft model with the tokenizer of --model.")
    add(
        "--methods",
        type=comma_list,
        metavar="A,B",
        help="Comma-separated draft methods: eagle3, eagle, ngram, model; or none.",
    )
    add("--dtype", help="Data type of the models (default: float32).")
    add("--device", help="Device on which the models compute: cpu or cuda.")
    add(
        "--drafter-device",
        metavar="DEVICE",
        help="Device on which the drafters compute: cpu or cuda (default: that of the target "
        "model).",
    )
    add(
        "--memory-fraction",
        type=float,
        metavar="F",
        help="Fraction of a GPU's memory that a verifier may use.",
    )
    add(
        "--placement",
        metavar="WHERE",
        help="Process in which the draft head runs: separate, colocated or fused.",
    )
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="Whether verifiers and drafters of a node exchange drafts directly between their GPUs "
        "(default: auto).",
    )
    add(
        "--draft-length",
        type=int,
        metavar="K",
        help="Draft tokens per round of a head in the verifier, or of a drafter with device "
        "exchange.",
    )
    add(
        "--draft-top-k",
        type=int,
        metavar="K",
        help="Branching factor of the draft tree of a head in the verifier.",
    )
    add(
        "--look-ahead",
        type=int,
        choices=(0, 1),
        help="Look-ahead of requests that do not set it: 0 (never) or 1 (chosen by the planner).",
    )
    add(
        "--fan-out",
        type=int,
        metavar="N",
        help="Number of outcomes drafted ahead for requests that do not set it; 0: chosen by the "
        "drafter.",
    )
    add(
        "--planner",
        help="Whether speculation adapts to measurements: automatic or fixed (default: automatic).",
    )
    add(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_const",
        const=False,
        help="Launch kernels one by one instead of replaying CUDA graphs, for debugging.",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help="Disable prefix caching: compute every prompt from its first token.",
    )
    add(
        "--batch-invariant",
        action="store_const",
        const=True,
        help="Make outputs independent of the other requests in a batch.",
    )
    add(
        "--simulated-acceptance",
        metavar="RATES",
        help="Benchmark only: accept drafts at random at these rates.",
    )
    add(
        "--listen",
        metavar="HOST:PORT",
        help="Address of the gRPC client API (default: port 50050 of 127.0.0.1, or of the node's "
        "address with --detached).",
    )
    add("--http", metavar="HOST:PORT", help="Address of the OpenAI-compatible HTTP API.")
    add("--kv-tokens", type=int, metavar="N", help="KV cache size of each verifier in tokens.")
    add(
        "--max-sessions",
        type=int,
        metavar="N",
        help="Largest number of sessions that each verifier runs at once.",
    )
    add(
        "--queue-limit",
        type=int,
        metavar="N",
        help="Largest number of requests that wait in the queue.",
    )
    add(
        "--journal",
        type=Path,
        metavar="FILE",
        help="Log file from which a restarted router restores resumable requests.",
    )
    add("--threads", type=int, metavar="N", help="Compute threads of each actor.")
    add(
        "--busy-polling-cores",
        type=int,
        metavar="N",
        help="CPU cores that each actor keeps busy-polling to reduce wake-up latency.",
    )
    add(
        "--metrics-port",
        type=int,
        metavar="P",
        help="Prometheus port of the router; 0: a free port.",
    )
    add(
        "--member-metrics-port",
        type=int,
        metavar="P",
        help="First Prometheus port of the actors: verifier N has P + 2 N, drafter N the next one.",
    )
    add(
        "--api-keys",
        metavar="FILE.toml",
        type=Path,
        help="Key file on the router's node; clients must send one of its API keys.",
    )
    add(
        "--exchange",
        help="Transport between actors: grpc, or refs for actor calls with object refs "
        "(default: grpc).",
    )
    add(
        "--ray-address",
        metavar="ADDR",
        help="Ray cluster to join: HOST:PORT or auto (default: start a local Ray).",
    )
    add("--namespace", metavar="NAME", help="Ray namespace of the actors (default: outrider).")
    add(
        "--cpus-per-actor",
        type=float,
        metavar="N",
        help="CPUs that Ray reserves for each actor (default: 0).",
    )
    add(
        "--gpus-per-actor",
        type=float,
        metavar="N",
        help="GPUs that Ray reserves for each actor on cuda.",
    )
    add(
        "--strategy",
        help="Placement strategy: pack, spread, strict-pack or strict-spread (default: pack).",
    )
    add("--verifier-resource", metavar="NAME", help="Ray custom resource that verifiers need.")
    add("--drafter-resource", metavar="NAME", help="Ray custom resource that drafters need.")
    add(
        "--detached",
        action="store_const",
        const=True,
        help="Exit once the fleet serves, and leave it running.",
    )
    add("--verifiers", type=int, metavar="N", help="Number of verifiers (default: 1).")
    add("--drafters", type=int, metavar="N", help="Number of drafters (default: 1).")
    for kind in ("verifiers", "drafters"):
        add(
            f"--max-{kind}",
            type=int,
            metavar="N",
            dest=f"autoscale.max_{kind}",
            help=f"Largest number of {kind} under load (default: the number at the start).",
        )
    add(
        "--start-timeout-s",
        type=float,
        metavar="S",
        help="Seconds that an actor may take to start (default: 600).",
    )
    add(
        "--drain-timeout-s",
        type=float,
        metavar="S",
        help="Seconds that running requests get to finish after SIGTERM (default: 5).",
    )
    add("--log-level", help="Log level: DEBUG, INFO, WARNING or ERROR (default: INFO).")
    return parser


async def serve(config: RayFleetConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Ray must have been initialised."""
    from outrider_ray.fleet_lifecycle import supervise

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def serving(_fleet: ActorFleet, front: EmbeddedRouter) -> None:
        tune_garbage_collector()
        _say_ready(address=front.address, http=front.http, metrics=front.metrics)

    await supervise(config, stop, serving)


def _detach(config: RayFleetConfig) -> None:
    """Start a fleet that continues to run after this process has ended."""
    from outrider_ray.supervisor import start_detached

    status = start_detached(config)
    _say_ready(address=status.address, http=status.http, metrics=status.metrics)


def _say_ready(**addresses: str) -> None:
    """Print the ready line with all addresses that are not empty."""
    found = {name: address for name, address in addresses.items() if address}
    sys.stdout.write(json.dumps({"event": "ready"} | found) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with explain_missing_packages("Ray as a runtime"):
            return _run(arguments)
    except (OutriderError, OSError) as error:
        sys.stderr.write(json.dumps({"event": "failed", "reason": str(error)}) + "\n")
        return _EXIT_MISUSE
    except KeyboardInterrupt:
        pass
    return 0


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in NAMES:
        return run_command(arguments)
    config = parse_args(arguments)
    setup_logging(config.log_level)
    from outrider_ray.cluster import ray_cluster

    with ray_cluster(config):
        if config.detached:
            _detach(config)
        else:
            run_event_loop(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
