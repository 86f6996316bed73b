"""Command line of the router process: parses flags, starts the servers and drains on a signal.

Once the router serves, the process prints one line {"event": "ready", "address": "HOST:PORT"} to
stdout. The line also has the keys `http`, `metrics`, `health` and `pool` for those of the ports
that are enabled. Logs go to stderr. Heavy modules are imported after the flags are parsed, so that
--help and invalid flags answer at once.
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
from outrider.text.output_parsers.formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from outrider_router.config import RouterConfig

if TYPE_CHECKING:
    from outrider.text.tokenizer import Tokenizer
    from outrider_router.api.http import HttpServer
    from outrider_router.requests.service import RouterService

logger = logging.getLogger(__name__)

_EXIT_MISUSE = 2
_LOOK_S = 0.02


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """Return the configuration from the file, the environment and the flags. Raises
    InvalidRequestError if a value is invalid.
    """
    return parse_config(RouterConfig, make_parser(), argv, "router").config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. Each flag's `dest` is the configuration key that the
    flag sets.
    """
    parser = argparse.ArgumentParser(
        prog="outrider-router",
        description="Serve clients and assign their requests to verifiers.",
    )
    parser.add_argument("--config", metavar="FILE.toml", help="TOML configuration file.")
    parser.add_argument("--listen", metavar="HOST:PORT", help="Address of the gRPC client API.")
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="Address of the OpenAI-compatible HTTP API."
    )
    parser.add_argument(
        "--reuse-ports",
        action=argparse.BooleanOptionalAction,
        help="Whether other routers may listen at the same addresses (default: no).",
    )
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        help="Whether to use shared memory instead of gRPC with verifiers on this host "
        "(default: yes).",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="Model directory from which the tokenizer is loaded."
    )
    parser.add_argument("--model-name", metavar="NAME", help="Model name that clients send.")
    parser.add_argument(
        "--verifier",
        metavar="ADDR",
        action="append",
        dest="verifiers",
        help="Address of a verifier; may be repeated.",
    )
    parser.add_argument(
        "--drafter",
        metavar="ADDR",
        action="append",
        dest="drafters",
        help="Address of a drafter; may be repeated.",
    )
    parser.add_argument(
        "--router",
        metavar="ADDR",
        action="append",
        dest="routers",
        help="Address of a router of the same fleet, where streams are looked for that a client "
        "resumes here; may be repeated.",
    )
    parser.add_argument(
        "--method",
        choices=[method.value for method in DraftMethod],
        dest="speculation.method",
        help="Draft method of requests that name none (default: eagle3).",
    )
    parser.add_argument(
        "--look-ahead",
        type=int,
        choices=(0, 1),
        dest="speculation.look_ahead",
        help="Look-ahead of requests that do not set it; 0: never draft before the verdict, 1: "
        "when the verifier's planner expects a gain (default: 1).",
    )
    parser.add_argument(
        "--fan-out",
        type=int,
        metavar="N",
        dest="speculation.fan_out",
        help="Number of outcomes drafted ahead for requests that do not set it; 0: chosen by the "
        "drafter (default: 0).",
    )
    parser.add_argument(
        "--pool-listen",
        metavar="HOST:PORT",
        help="Address of the API that adds and removes drafters (default: not served).",
    )
    parser.add_argument(
        "--journal",
        metavar="FILE",
        help="Log file from which resumable requests are restored after a restart.",
    )
    parser.add_argument(
        "--journal-fsync",
        choices=("off", "interval", "always"),
        help="When the journal is flushed to disk; interval: every second (default: interval).",
    )
    parser.add_argument(
        "--drain-timeout-s",
        type=float,
        metavar="S",
        help="Seconds that running requests get to finish after SIGTERM (default: 30).",
    )
    parser.add_argument(
        "--queue-limit",
        type=int,
        metavar="N",
        help="Largest number of requests that wait in the queue (default: 256).",
    )
    parser.add_argument(
        "--slow-reader-timeout-s",
        type=float,
        metavar="S",
        dest="overload.slow_reader_timeout_s",
        help="Seconds after which a client that does not read is disconnected (default: 30).",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="P",
        help="Port of the Prometheus endpoint; 0: a free port (default: no endpoint).",
    )
    parser.add_argument(
        "--metrics-compat",
        choices=("none", "vllm"),
        help="Server under whose metric names the metrics are exported too (default: none).",
    )
    parser.add_argument(
        "--tool-call-parser",
        choices=(AUTO, NONE, *TOOL_FORMATS),
        help="Format in which the model writes tool calls; none: calls are not read (default: "
        "auto, the chat template decides).",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=(AUTO, NONE, *REASONING_FORMATS),
        help="Format in which the model writes its reasoning; none: it is part of the answer's "
        "text (default: auto, the chat template decides).",
    )
    parser.add_argument(
        "--health-listen",
        metavar="HOST:PORT",
        help="Address of a plain-text gRPC port that serves only health checks.",
    )
    parser.add_argument(
        "--api-keys",
        metavar="FILE.toml",
        help="Key file; clients must send one of its API keys.",
    )
    add_tls_arguments(parser)
    parser.add_argument(
        "--tls-client-auth",
        dest="tls.client_auth",
        action=argparse.BooleanOptionalAction,
        help="Whether clients must present a certificate of the role client (default: no).",
    )
    parser.add_argument(
        "--client-api-tls-cert",
        metavar="FILE.pem",
        dest="client_api_tls.cert",
        help="Certificate presented to clients (default: that of --tls-cert).",
    )
    parser.add_argument(
        "--client-api-tls-key",
        metavar="FILE.pem",
        dest="client_api_tls.key",
        help="Private key of --client-api-tls-cert.",
    )
    add_tracing_flags(parser)
    parser.add_argument(
        "--log-level", help="Log level: DEBUG, INFO, WARNING or ERROR (default: INFO)."
    )
    return parser


def check_files(config: RouterConfig) -> None:
    """Check the files other than certificates that a router reads at its start. Raises
    NotFoundError if a file is missing and InvalidRequestError if its contents are invalid.
    """
    from outrider_router.base.api_keys import read_keys

    if config.api_keys is not None:
        read_keys(config.api_keys)


async def serve(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    from outrider.process_metrics import ProcessMetrics, ProcessState
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
    process = ProcessMetrics()
    metrics = RouterMetrics(process.registry)
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
            # With shared ports the kernel assigns connections to this router as soon as it listens.
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
        process.set_state(ProcessState.SERVING)
        tune_garbage_collector()
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()
        process.set_state(ProcessState.DRAINING)
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
    """Wait until requests can be served or `stop` is set."""
    while not (service.readiness.is_ready or stop.is_set()):
        await asyncio.sleep(_LOOK_S)


def _tokenizer_of(model: Path) -> Tokenizer:
    from outrider.models import resolve_tokenizer
    from outrider.text.tokenizer import Tokenizer

    return Tokenizer.load(resolve_tokenizer(model))


def _stop_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Return two events, set by the first and by the second SIGTERM or SIGINT."""
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
    """Run the router process and return its exit status."""
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
