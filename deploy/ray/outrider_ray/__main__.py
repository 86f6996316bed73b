"""Command line of the launcher: `python -m outrider_ray`.

Prints one line {"event": "ready", "address": "HOST:PORT"} on stdout when it serves; logs go to
stderr. Heavy imports follow the parsing of the flags, so that --help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from outrider.config import comma_list, parse_config
from outrider.errors import OutriderError
from outrider.logs import setup_logging
from outrider.process import run
from outrider_ray.config import LaunchConfig

logger = logging.getLogger(__name__)

_EXIT_MISUSE = 2


def parse_args(argv: Sequence[str] | None = None) -> LaunchConfig:
    """Configuration from a file, the environment and flags. Raises InvalidRequestError."""
    return parse_config(LaunchConfig, make_parser(), argv, "ray").config


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags are stored by the keys that they set."""
    parser = argparse.ArgumentParser(
        prog="outrider_ray", description="Serve a model with verifier and drafter as Ray actors."
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
    add("--draft-length", type=int, metavar="K", help="of a head in the verifier")
    add("--draft-topk", type=int, metavar="K", help="children it tries of a node")
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
    add("--simulated-acceptance", metavar="RATES", help="benchmarks only: drafts stand by chance")
    add("--listen", metavar="HOST:PORT", help="address of the client API")
    add("--http", metavar="HOST:PORT", help="address of OpenAI's API over HTTP")
    add("--kv-tokens", type=int, metavar="N", help="KV budget of the verifier")
    add("--max-sessions", type=int, metavar="N", help="sessions served at once")
    add("--queue-limit", type=int, metavar="N", help="requests that may wait")
    add("--journal", type=Path, metavar="FILE", help="log by which requests survive the router")
    add("--threads", type=int, metavar="N", help="compute threads of each actor")
    add("--awake-cores", type=int, metavar="N", help="cores that each actor keeps from going idle")
    add("--metrics-port", type=int, metavar="P", help="of the router; 0 takes a free one")
    add("--exchange", help="grpc (default), or refs: actor calls with object refs")
    add("--ray-address", metavar="ADDR", help="cluster to join: HOST:PORT or auto")
    add("--namespace", metavar="NAME", help="Ray namespace of the actors")
    add("--cpus-per-actor", type=float, metavar="N", help="CPUs that Ray reserves; default 0")
    add("--gpus-per-actor", type=float, metavar="N", help="GPUs that Ray reserves on cuda")
    add("--strategy", help="pack (default), spread, strict-pack or strict-spread")
    add("--verifier-resource", metavar="NAME", help="custom resource that places the verifier")
    add("--drafter-resource", metavar="NAME", help="custom resource that places the drafter")
    add("--start-timeout-s", type=float, metavar="S", help="longest start of an actor")
    add("--drain-s", type=float, metavar="S", help="time of running requests after SIGTERM")
    add("--log-level", help="DEBUG, INFO, WARNING or ERROR")
    return parser


async def serve(config: LaunchConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. Ray must be up."""
    from outrider_ray.fleet import Fleet

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    fleet = Fleet(config)
    try:
        if await _unless(stop, fleet.start()):
            await _serve_clients(config, stop)
    finally:
        await fleet.stop()


async def _serve_clients(config: LaunchConfig, stop: asyncio.Event) -> None:
    from outrider_ray.front import serve_front

    async with serve_front(config) as front:
        ready = {"event": "ready", "address": front.address}
        if front.http:
            ready["http"] = front.http
        if front.metrics:
            ready["metrics"] = front.metrics
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()
        logger.info("draining", extra={"running": len(front.service.journal)})
        done = await front.service.drain(config.drain_s)
        logger.info("stopping", extra={"drained": done})


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work unless `stop` is set before it is done; whether it was done."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    try:
        config = parse_args(argv)
        setup_logging(config.log_level)
        from outrider_ray.cluster import ray_cluster

        with ray_cluster(config):
            run(serve(config))
    except (OutriderError, OSError) as error:
        sys.stderr.write(json.dumps({"event": "failed", "reason": str(error)}) + "\n")
        return _EXIT_MISUSE
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
