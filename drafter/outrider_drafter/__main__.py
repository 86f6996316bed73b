"""Command line of the drafter process.

Prints one line {"event": "ready", "address": "HOST:PORT"} on stdout once it serves; logs go to
stderr. Heavy modules are imported after the flags are parsed, so that --help and usage errors
are shown quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from outrider.busy_polling import BusyCores
from outrider.config import comma_list, parse_config
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
from outrider_drafter.config import DTYPES, DrafterConfig

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from outrider.process_metrics import ProcessMetrics

logger = logging.getLogger(__name__)

_EXIT_LOST = 1
_EXIT_MISUSE = 2


def parse_args(argv: Sequence[str] | None = None) -> DrafterConfig:
    """Return the configuration from the configuration file, the environment and the flags. Raises
    InvalidRequestError if the configuration is invalid."""
    return parse_config(DrafterConfig, make_parser(), argv, "drafter").config


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The parser stores each flag under the name of the
    configuration key that the flag sets."""
    parser = argparse.ArgumentParser(
        prog="outrider-drafter", description="Propose draft trees for a verifier's sessions."
    )
    parser.add_argument("--config", metavar="FILE.toml", help="Configuration file.")
    parser.add_argument("--listen", metavar="HOST:PORT", help="Address of the control service.")
    parser.add_argument(
        "--model", metavar="DIR|NAME", help="Target model, for its vocabulary and embedding."
    )
    parser.add_argument("--head", metavar="DIR", help="EAGLE head.")
    parser.add_argument(
        "--draft-model", metavar="DIR|NAME", help="Small draft model with the target's tokenizer."
    )
    parser.add_argument(
        "--methods",
        type=comma_list,
        metavar="A,B",
        help="Draft methods: eagle3, eagle, ngram, model.",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="Dtype of the draft models.")
    parser.add_argument("--device", help="torch device of the models.")
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="Draft by captured CUDA graphs on a GPU. Default: on.",
    )
    parser.add_argument("--threads", type=int, help="Compute threads of torch.")
    parser.add_argument(
        "--shared-memory",
        action=argparse.BooleanOptionalAction,
        help="Use shared memory with verifiers of the same host. Default: on.",
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
    parser.add_argument(
        "--drain-timeout-s", type=float, help="Seconds to hand sessions over after SIGTERM."
    )
    parser.add_argument("--drafter-id", metavar="NAME", help="Stable name of this drafter.")
    parser.add_argument("--metrics-port", type=int, help="Prometheus port; 0 takes a free one.")
    parser.add_argument(
        "--health-listen", metavar="HOST:PORT", help="Address that serves only the health service."
    )
    parser.add_argument(
        "--trace-file",
        metavar="FILE.json",
        help="File for the timeline, which is written at the end.",
    )
    parser.add_argument(
        "--hook",
        dest="hooks",
        action="append",
        metavar="MODULE[:KEY=VALUE,...]",
        help="Python module to load into this process. May be repeated.",
    )
    add_tls_arguments(parser)
    add_tracing_flags(parser)
    parser.add_argument("--log-level", help="Log level: DEBUG, INFO, WARNING or ERROR.")
    return parser


async def serve(config: DrafterConfig) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, then wait for routers to move the sessions to other
    drafters. Serving also ends when a device is lost or the drafting thread hangs. Return the exit
    status.

    The metrics port opens before the models are loaded, so that a drafter that loads can be told
    from one that is lost."""
    from outrider.process_metrics import ProcessMetrics

    process = ProcessMetrics()
    metrics_address = _serve_metrics(config, process.registry)
    with BusyCores.claim(config.busy_polling_cores) as busy_cores:
        return await _serve(config, busy_cores, process, metrics_address)


async def _serve(
    config: DrafterConfig, busy_cores: BusyCores, process: ProcessMetrics, metrics_address: str
) -> int:
    from outrider.process_metrics import ProcessState
    from outrider.transport.grpc import AccessRules, GrpcDialer, GrpcServer, drafter_services
    from outrider_drafter.hooks import DrafterHooks, VerifierAccess
    from outrider_drafter.server.build import build_service

    hooks = install_hooks(config.hooks, DrafterHooks())
    access = hooks.wrap_access(VerifierAccess(GrpcDialer(tls=config.tls)))
    service = await run_in_short_thread(build_service, config, access, busy_cores, hooks)
    tune_process()
    busy_cores.adopt_thread()
    process.add_registry(service.metrics.registry)
    ports = PortMetrics(process.registry)
    rules = AccessRules(
        tls=config.tls, on_refused=ports.count_refusal, on_handshake=ports.count_handshake
    )
    server = GrpcServer(
        config.listen,
        drafter_services(service),
        access=rules,
        health_address=config.health_listen,
    )
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        address = await server.start()
        process.set_state(ProcessState.SERVING)
        ready = {"event": "ready", "address": address}
        if metrics_address:
            ready["metrics"] = metrics_address
        if server.health_address:
            ready["health"] = server.health_address
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await _first(signals.get(), service.lost.wait())
        process.set_state(ProcessState.DRAINING)
        if service.is_stalled:
            server.set_serving(False)
            server.set_live(False)
            exit_within(EXIT_GRACE_S, EXIT_STALLED)
            await asyncio.sleep(EXIT_NOTICE_S)
        if not service.lost.is_set():
            logger.info("draining", extra={"sessions": service.num_sessions})
            # A second signal ends the wait for the routers.
            await _first(
                service.hand_over(config.drain_timeout_s), signals.get(), service.lost.wait()
            )
        logger.info("stopping", extra={"sessions": service.num_sessions})
        if service.is_stalled:
            return EXIT_STALLED
        return _EXIT_LOST if service.lost.is_set() else 0
    finally:
        await server.stop(1.0)
        await service.close()
        await access.dialer.close()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines ends, then cancel the remaining ones."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve_metrics(config: DrafterConfig, registry: CollectorRegistry) -> str:
    """Start the Prometheus endpoint. Return its address, or an empty string if it is disabled."""
    if config.metrics_port < 0:
        return ""
    return serve_metrics(registry, config.metrics_host, config.metrics_port, tls=config.tls)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the drafter process and return its exit status."""
    try:
        config = parse_args(argv)
        setup_logging(config.log_level)
        set_openmp_spin()
        spans = export_spans(config.tracing, "outrider-drafter", config.drafter_id)
        with (
            record_timeline(config.trace_file, "drafter"),
            spans,
            explain_missing_packages("outrider-drafter"),
        ):
            status = run_event_loop(serve(config))
        if status == EXIT_STALLED:
            # A normal exit of the interpreter could wait for the hung thread.
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
