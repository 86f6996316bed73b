"""Command line of the verifier process.

The process prints one line {"event": "ready", "address": "HOST:PORT"} to stdout when it starts to
serve; logs go to stderr. Heavy modules are imported after the flags are parsed, so that --help and
usage errors respond at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.busy_polling import BusyCores
from outrider.config import parse_config
from outrider.config.hooks import install_hooks
from outrider.errors import OutriderError
from outrider.extras import explain_missing_packages
from outrider.failure_event import report_failure
from outrider.logs import setup_logging
from outrider.metrics_port import PortMetrics, serve_metrics
from outrider.process_tuning import (
    add_tls_arguments,
    run_event_loop,
    run_in_short_thread,
    set_openmp_spin,
    tune_process,
)
from outrider.signals import stop_signals
from outrider.spans import add_tracing_flags, export_spans
from outrider.spec.exchange_mode import EXCHANGE_MODES, ON
from outrider.timeline import record_timeline
from outrider.watchdog import EXIT_GRACE_S, EXIT_NOTICE_S, EXIT_STALLED, exit_now, exit_within
from outrider_verifier.config import DTYPES, PLACEMENTS, PLANNERS, VerifierConfig

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from outrider.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_EXIT_LOST = 1
_EXIT_MISUSE = 2


def parse_args(argv: Sequence[str] | None = None) -> VerifierConfig:
    """Return the configuration, read from a file, environment variables and flags. Raise
    InvalidRequestError if it is invalid."""
    return parse_config(VerifierConfig, make_parser(), argv, "verifier").config


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser. Each flag is stored under the configuration key that it sets."""
    parser = argparse.ArgumentParser(
        prog="outrider-verifier", description="Host the target model and verify drafts."
    )
    parser.add_argument("--config", metavar="FILE.toml", help="Configuration file.")
    parser.add_argument("--model", metavar="NAME|DIR|FILE", help="Target model.")
    parser.add_argument("--listen", metavar="HOST:PORT", help="Address of the gRPC services.")
    parser.add_argument(
        "--feature-head",
        metavar="DIR",
        help="Draft head whose feature projection runs in this process.",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="Dtype of the target.")
    parser.add_argument("--device", help="torch device of the models.")
    parser.add_argument("--placement", choices=PLACEMENTS, help="Where drafts are made.")
    parser.add_argument(
        "--planner", choices=PLANNERS, help="Whether speculation adapts to measurements."
    )
    parser.add_argument(
        "--draft-length", type=int, help="Draft tokens per round of an in-process drafter."
    )
    parser.add_argument(
        "--draft-top-k", type=int, help="Branching factor of an in-process drafter's trees."
    )
    parser.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_const",
        const=False,
        help="Launch kernels one by one instead of replaying CUDA graphs.",
    )
    parser.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        help="Compute the same bits for a token whatever runs beside it.",
    )
    parser.add_argument(
        "--simulated-acceptance",
        metavar="MEAN|length:MEAN|R1,R2,...",
        help="Benchmarks only: accept drafts at random.",
    )
    parser.add_argument(
        "--kv-tokens", type=int, help="KV cache size in tokens; 0 takes the free memory."
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        help="Reuse the KV cache of earlier prompts with the same prefix.",
    )
    parser.add_argument(
        "--memory-fraction", type=float, help="Share of the device's memory that may be used."
    )
    parser.add_argument(
        "--max-sessions", type=int, help="Maximum number of sessions that run at once."
    )
    parser.add_argument(
        "--max-context-len", type=int, help="Maximum length of prompt and output in tokens."
    )
    parser.add_argument("--threads", type=int, help="Compute threads of torch.")
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        help="Use shared memory with drafters and routers of the same host. Default: on.",
    )
    parser.add_argument(
        "--device-exchange",
        choices=EXCHANGE_MODES,
        nargs="?",
        const=ON,
        help="Exchange drafts and features directly between GPUs of one host. Default: auto.",
    )
    parser.add_argument(
        "--busy-polling-cores", type=int, help="CPU cores kept busy-polling while serving."
    )
    parser.add_argument("--verifier-id", metavar="NAME", help="Stable name of this verifier.")
    parser.add_argument("--metrics-port", type=int, help="Prometheus port; 0 takes a free one.")
    parser.add_argument(
        "--health-listen", metavar="HOST:PORT", help="Address that serves only the health service."
    )
    parser.add_argument(
        "--hook",
        dest="hooks",
        action="append",
        metavar="MODULE[:KEY=VALUE,...]",
        help="Python module to load into this process. May be repeated.",
    )
    parser.add_argument(
        "--trace-file",
        metavar="FILE.json",
        help="File for the timeline, which is written at the end.",
    )
    add_tls_arguments(parser)
    add_tracing_flags(parser)
    parser.add_argument("--log-level", help="Log level: DEBUG, INFO, WARNING or ERROR.")
    return parser


async def serve(config: VerifierConfig) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain the sessions. If the device is lost or the
    engine thread hangs, stop without draining. Return the exit status.

    The metrics port opens before the models are loaded, so that a verifier that loads can be told
    from one that is lost."""
    from outrider.process_metrics import ProcessMetrics

    process = ProcessMetrics()
    metrics_address = _serve_metrics(config, process.registry)
    with BusyCores.claim(config.busy_polling_cores) as busy_cores:
        return await _serve(config, busy_cores, process, metrics_address)


async def _serve(
    config: VerifierConfig, busy_cores: BusyCores, process: ProcessMetrics, metrics_address: str
) -> int:
    from outrider.process_metrics import ProcessState
    from outrider.transport.grpc import AccessRules, GrpcConfig, GrpcServer, verifier_services
    from outrider.transport.heartbeat import HeartbeatConfig
    from outrider_verifier.hooks import VerifierHooks
    from outrider_verifier.server.service_builder import build_service

    hooks = install_hooks(config.hooks, VerifierHooks())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    interval_s, router_silence_s = config.heartbeat_ms / 1000.0, config.router_silence_ms / 1000.0
    grpc_config = GrpcConfig(
        heartbeat=HeartbeatConfig(interval_s=interval_s, timeout_s=config.peer_timeout_ms / 1000.0),
        sessions_heartbeat=HeartbeatConfig(interval_s=interval_s, timeout_s=router_silence_s),
        # A router that is stopped for a while does not answer probes of its connection either.
        keepalive_timeout_s=router_silence_s,
        shm_channels=config.shared_memory,
    )
    service = await run_in_short_thread(build_service, config, busy_cores, hooks)
    tune_process()
    process.add_registry(service.metrics.registry)
    ports = PortMetrics(process.registry)
    access = AccessRules(
        tls=config.tls, on_refused=ports.count_refusal, on_handshake=ports.count_handshake
    )
    services = verifier_services(service, grpc_config)
    server = GrpcServer(
        config.listen,
        services,
        config=grpc_config,
        access=access,
        health_address=config.health_listen,
    )
    try:
        busy_cores.adopt_thread()
        service.start()
        ready = {"event": "ready", "address": await server.start()}
        process.set_state(ProcessState.SERVING)
        if metrics_address:
            ready["metrics"] = metrics_address
        if server.health_address:
            ready["health"] = server.health_address
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        waits = [asyncio.create_task(event.wait()) for event in (stop, service.lost)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        server.set_serving(False)
        process.set_state(ProcessState.DRAINING)
        if service.is_stalled:
            server.set_live(False)
            exit_within(EXIT_GRACE_S, EXIT_STALLED)
            await asyncio.sleep(EXIT_NOTICE_S)
        drained = True
        if not service.lost.is_set():
            logger.info("draining")
            drained = await service.drain(config.drain_timeout_s)
        logger.info("stopping", extra={"drained": drained})
        if service.is_stalled:
            return EXIT_STALLED
        return _EXIT_LOST if service.lost.is_set() else 0
    finally:
        await service.stop()
        await server.stop(1.0)


def _serve_metrics(config: VerifierConfig, registry: CollectorRegistry) -> str:
    """Start the Prometheus endpoint. Return its address, or "" if it is disabled."""
    if config.metrics_port < 0:
        return ""
    return serve_metrics(registry, config.metrics_host, config.metrics_port, tls=config.tls)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verifier process. Return the exit status."""
    try:
        config = parse_args(argv)
        setup_logging(config.log_level)
        set_openmp_spin()
        spans = export_spans(config.tracing, "outrider-verifier", config.verifier_id)
        with (
            record_timeline(config.trace_file, "verifier"),
            spans,
            explain_missing_packages("outrider-verifier"),
        ):
            status = run_event_loop(serve(config))
        if status == EXIT_STALLED:
            # The shutdown of the interpreter could wait for the thread that hangs.
            exit_now(status)
        return status
    except OutriderError as error:
        report_failure(error.message)
        return _EXIT_MISUSE
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
