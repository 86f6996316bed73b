"""Command line of the router process: parses flags, starts the servers and drains on a signal.

Prints one line {"event": "ready", "address": "HOST:PORT"} on stdout when it serves, with `http`,
`metrics` and `pool` where these are served; logs go to stderr. Heavy modules are imported after
the flags are parsed, so that --help and invalid flags answer at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.config import parse_config
from outrider.errors import OutriderError
from outrider.extras import explain_missing_packages
from outrider.failure_event import report_failure
from outrider.logs import setup_logging
from outrider.process_tuning import (
    add_tls_arguments,
    raise_file_limit,
    run_event_loop,
    tune_garbage_collector,
)
from outrider.spans import add_tracing_flags, export_spans
from outrider.spec.plan import DraftMethod
from outrider_router.config import RouterConfig

if TYPE_CHECKING:
    from outrider.text.tokenizer import Tokenizer
    from outrider_router.api.http import HttpServer
    from outrider_router.requests.service import RouterService

logger = logging.getLogger(__name__)

_EXIT_MISUSE = 2
_LOOK_S = 0.02


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """Configuration from a file, the environment and flags. Raises InvalidRequestError."""
    return parse_config(RouterConfig, make_parser(), argv, "router").config


def make_parser() -> argparse.ArgumentParser:
    """The command line; flags are stored by the keys that they set."""
    parser = argparse.ArgumentParser(
        prog="outrider-router", description="Serve clients; place sessions on verifiers."
    )
    parser.add_argument("--config", metavar="FILE.toml", help="configuration file")
    parser.add_argument("--listen", metavar="HOST:PORT", help="address of the client API")
    parser.add_argument("--http", metavar="HOST:PORT", help="address of OpenAI's API over HTTP")
    parser.add_argument(
        "--reuse-ports",
        action=argparse.BooleanOptionalAction,
        help="other routers may serve clients at the same two addresses",
    )
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        help="reach verifiers of this host without the network (the default)",
    )
    parser.add_argument("--model", metavar="DIR", help="model directory; its tokenizer is read")
    parser.add_argument("--model-name", metavar="NAME", help="name that clients ask for")
    parser.add_argument(
        "--verifier", metavar="ADDR", action="append", dest="verifiers", help="repeatable"
    )
    parser.add_argument(
        "--drafter", metavar="ADDR", action="append", dest="drafters", help="repeatable"
    )
    parser.add_argument(
        "--method",
        choices=[method.value for method in DraftMethod],
        dest="speculation.method",
        help="draft source of requests that name none; default: eagle3",
    )
    parser.add_argument(
        "--look-ahead",
        type=int,
        choices=(0, 1),
        dest="speculation.look_ahead",
        help="of requests that leave it open; 0 drafts in lock-step, 1 is the planner's choice",
    )
    parser.add_argument(
        "--fan-out",
        type=int,
        metavar="N",
        dest="speculation.fan_out",
        help="outcomes drafted ahead, of requests that leave it open; 0: the drafter's choice",
    )
    parser.add_argument(
        "--pool-listen", metavar="HOST:PORT", help="where drafters are added and removed"
    )
    parser.add_argument(
        "--journal", metavar="FILE", help="log by which resumable requests survive a restart"
    )
    parser.add_argument(
        "--journal-fsync",
        choices=("off", "interval", "always"),
        help="when it is forced to the disk; default: interval, every second",
    )
    parser.add_argument(
        "--drain-timeout-s", type=float, metavar="S", help="that running requests get after SIGTERM"
    )
    parser.add_argument("--queue-limit", type=int, metavar="N", help="requests that may wait")
    parser.add_argument(
        "--slow-reader-timeout-s",
        type=float,
        metavar="S",
        dest="overload.slow_reader_timeout_s",
        help="a client that takes nothing for so long is not waited for",
    )
    parser.add_argument("--metrics-port", type=int, metavar="P", help="0 takes a free port")
    parser.add_argument(
        "--metrics-compat",
        choices=("none", "vllm"),
        help="export metrics under these names too, for tools that read them",
    )
    parser.add_argument(
        "--health-listen", metavar="HOST:PORT", help="address of a port that serves health alone"
    )
    parser.add_argument("--api-keys", metavar="FILE.toml", help="keys that clients must have")
    add_tls_arguments(parser)
    parser.add_argument(
        "--tls-client-auth",
        dest="tls.client_auth",
        action=argparse.BooleanOptionalAction,
        help="clients must show a certificate of the role client, too",
    )
    parser.add_argument(
        "--client-api-tls-cert",
        metavar="FILE.pem",
        dest="client_api_tls.cert",
        help="another for clients",
    )
    parser.add_argument(
        "--client-api-tls-key",
        metavar="FILE.pem",
        dest="client_api_tls.key",
        help="private key of it",
    )
    add_tracing_flags(parser)
    parser.add_argument("--log-level", help="DEBUG, INFO, WARNING or ERROR")
    return parser


def check_files(config: RouterConfig) -> None:
    """Check the files that a router reads at its start, beside its certificates. Raises
    NotFoundError and InvalidRequestError."""
    from outrider_router.base.api_keys import read_keys

    if config.api_keys is not None:
        read_keys(config.api_keys)


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    from outrider.transport.grpc import GrpcConfig, GrpcDialer
    from outrider_router.api.listeners import (
        make_client_server,
        make_pool_server,
        serve_router_metrics,
    )
    from outrider_router.api.metrics_export import register_fleet_metrics
    from outrider_router.base.metrics import RouterMetrics
    from outrider_router.requests.service import RouterService

    tokenizer = await asyncio.to_thread(_tokenizer_of, config.model)
    dialer = GrpcDialer(GrpcConfig(shm_channels=config.shared_memory), tls=config.tls)
    metrics = RouterMetrics()
    service = RouterService(
        config=config, tokenizer=tokenizer, dialer=dialer, metrics=metrics, clock=time.monotonic
    )
    register_fleet_metrics(service)
    server, pool = make_client_server(service), make_pool_server(service)
    http = _http_server(config, service)
    stop, again = _stop_events()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.access_control.reload_keys)
    try:
        service.restore_journal()
        if config.reuse_ports:
            # The system gives it connections as soon as it listens, others being ready or not.
            await service.start()
            await _until_ready(service, stop)
        address = await server.start(serving=service.readiness.is_ready)
        ready = {"event": "ready", "address": address}
        if config.metrics_port >= 0:
            ready["metrics"] = serve_router_metrics(service)
        if server.health_address:
            ready["health"] = server.health_address
        if pool is not None:
            ready["pool"] = await pool.start()
        if not config.reuse_ports:
            await service.start()
        if http is not None:
            ready["http"] = await http.start()
        tune_garbage_collector()
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()
        logger.info("draining", extra={"running": len(service.running_requests)})
        done = await service.drain(config.drain_timeout_s, again)
        logger.info("stopping", extra={"drained": done})
    finally:
        await service.close()
        if pool is not None:
            await pool.stop(0.0)
        if http is not None:
            await http.stop()
        await server.stop(1.0)
        await dialer.close()


async def _until_ready(service: RouterService, stop: asyncio.Event) -> None:
    """Wait until requests can be served, or the process is told to stop."""
    while not (service.readiness.is_ready or stop.is_set()):
        await asyncio.sleep(_LOOK_S)


def _tokenizer_of(model: Path) -> Tokenizer:
    from outrider.models import resolve_model
    from outrider.text.tokenizer import Tokenizer

    # A folder that holds no more than a tokenizer is enough for a router.
    return Tokenizer.load(model if model.is_dir() else resolve_model(str(model)))


def _stop_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    stop, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (again if stop.is_set() else stop).set())
    return stop, again


def _http_server(config: RouterConfig, service: RouterService) -> HttpServer | None:
    if not config.http:
        return None
    from outrider_router.api.http import HttpServer

    return HttpServer(config.http, service)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    try:
        config = parse_args(argv)
        setup_logging(config.log_level)
        raise_file_limit()
        spans = export_spans(config.tracing, "outrider-router", config.listen)
        with spans, explain_missing_packages("outrider-router"):
            run_event_loop(serve(config))
    except (OutriderError, OSError) as error:
        report_failure(str(error))
        return _EXIT_MISUSE
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
