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
    """Configuration from a file, the environment and flags. Raises InvalidRequestError."""
    return parse_config(RayFleetConfig, make_parser(), argv, "ray").config


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags are stored by the keys that they set."""
    parser = argparse.ArgumentParser(
        prog="outrider ray",
        description="Serve a model with verifiers and drafters as Ray actors.",
        epilog="status, stop and node as a first argument are commands: see `status --help`.",
    )
    add = parser.add_argument
    add("--config", metavar="FILE.toml", help="configuration file")
    add("--model", metavar="NAME|DIR", help="the target")
    add("--model-name", metavar="NAME", help="name that clients ask for")
    add("--head", metavar="DIR", help="EAGLE head")
    add("--draft-model", metavar="NAME|DIR", help="small model, same tokenizer")
    add("--methods", type=comma_list, metavar="A,B", help="eagle3, eagle, ngram, model; or none")
    add("--dtype", help="element type of the models")
    add("--device", help="of the models: cpu or cuda")
    add("--drafter-device", metavar="DEVICE", help="cpu or cuda; default: that of the target")
    add("--memory-fraction", type=float, metavar="F", help="of a GPU, for the verifier")
    add("--placement", metavar="WHERE", help="of the head: separate, colocated or fused")
    add(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="exchange drafts and features between GPUs of a node; default: auto",
    )
    add("--draft-length", type=int, metavar="K", help="of a head's chains")
    add("--draft-top-k", type=int, metavar="K", help="children it tries of a node")
    add("--look-ahead", type=int, choices=(0, 1), help="of requests that leave it open")
    add("--fan-out", type=int, metavar="N", help="outcomes drafted ahead; 0: drafter's choice")
    add("--planner", help="automatic (default) or fixed: who decides whether drafts pay")
    add(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_const",
        const=False,
        help="launch kernels one by one",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_const",
        const=False,
        help="compute every prompt from its beginning",
    )
    add(
        "--simulated-acceptance",
        metavar="RATES",
        help="benchmarks only: drafts are accepted by chance",
    )
    add("--listen", metavar="HOST:PORT", help="address of the client API")
    add("--http", metavar="HOST:PORT", help="address of OpenAI's API over HTTP")
    add("--kv-tokens", type=int, metavar="N", help="KV budget of the verifier")
    add("--max-sessions", type=int, metavar="N", help="sessions served at once")
    add("--queue-limit", type=int, metavar="N", help="requests that may wait")
    add("--journal", type=Path, metavar="FILE", help="log by which requests survive the router")
    add("--threads", type=int, metavar="N", help="compute threads of each actor")
    add(
        "--busy-polling-cores",
        type=int,
        metavar="N",
        help="cores that each actor keeps from going idle",
    )
    add("--metrics-port", type=int, metavar="P", help="of the router; 0 takes a free one")
    add("--exchange", help="grpc (default), or refs: actor calls with object refs")
    add("--ray-address", metavar="ADDR", help="cluster to join: HOST:PORT or auto")
    add("--namespace", metavar="NAME", help="Ray namespace of the actors")
    add("--cpus-per-actor", type=float, metavar="N", help="CPUs that Ray reserves; default 0")
    add("--gpus-per-actor", type=float, metavar="N", help="GPUs that Ray reserves on cuda")
    add("--strategy", help="pack (default), spread, strict-pack or strict-spread")
    add("--verifier-resource", metavar="NAME", help="custom resource that places verifiers")
    add("--drafter-resource", metavar="NAME", help="custom resource that places drafters")
    add("--detached", action="store_const", const=True, help="leave the fleet running, and go")
    add("--verifiers", type=int, metavar="N", help="of the fleet; default: 1")
    add("--drafters", type=int, metavar="N", help="of the fleet; default: 1")
    most = "MOST, while load asks for it; default: no more than at the start"
    add("--max-verifiers", type=int, metavar="MOST", dest="autoscale.max_verifiers", help=most)
    add("--max-drafters", type=int, metavar="MOST", dest="autoscale.max_drafters", help=most)
    add("--start-timeout-s", type=float, metavar="S", help="longest start of an actor")
    add("--drain-timeout-s", type=float, metavar="S", help="time of running requests after SIGTERM")
    add("--log-level", help="DEBUG, INFO, WARNING or ERROR")
    return parser


async def serve(config: RayFleetConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Ray must be up."""
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
    """Start a fleet that goes on without this process."""
    from outrider_ray.supervisor import start_detached

    status = start_detached(config)
    _say_ready(address=status.address, http=status.http, metrics=status.metrics)


def _say_ready(**addresses: str) -> None:
    """The ready line, with the addresses that there are."""
    found = {name: address for name, address in addresses.items() if address}
    sys.stdout.write(json.dumps({"event": "ready"} | found) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
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
