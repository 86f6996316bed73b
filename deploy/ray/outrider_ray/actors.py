"""Endpoint factories that run inside the actors, the only processes that import torch."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from outrider_drafter.config import DrafterConfig
from outrider_verifier.config import VerifierConfig

from outrider.busy_polling import BusyCores
from outrider.config.hooks import install_hooks
from outrider.logs import setup_logging
from outrider.metrics_port import serve_metrics
from outrider.process_tuning import run_in_short_thread, set_openmp_spin, tune_process
from outrider.transport.ray import RayConfig, RayDialer
from outrider.watchdog import EXIT_GRACE_S, EXIT_STALLED, exit_within

if TYPE_CHECKING:
    from outrider_drafter.server.service import DrafterService
    from outrider_verifier.server.service import VerifierService
    from prometheus_client import CollectorRegistry

ServiceT = TypeVar("ServiceT", "VerifierService", "DrafterService")

LOST_GRACE_S = 1.0
"""Time in seconds between the loss of an actor's device and the end of the actor's process. During
this time the actor's sessions receive an error."""


@asynccontextmanager
async def verifier_endpoint(
    config: VerifierConfig, ray_config: RayConfig
) -> AsyncGenerator[VerifierService]:
    """Load the model and run a verifier in this actor for the duration of an `async with` block."""
    prepare(config.threads, config.log_level)
    from outrider_verifier.hooks import VerifierHooks
    from outrider_verifier.server.service_builder import build_service

    hooks = install_hooks(config.hooks, VerifierHooks())

    async def end(service: VerifierService) -> None:
        await service.stop()

    async with _built(
        partial(build_service, config, hooks=hooks), end, config.busy_polling_cores
    ) as service:
        service.start()
        _serve_metrics(service.metrics.registry, config.metrics_port, ray_config)
        yield service


@asynccontextmanager
async def drafter_endpoint(
    config: DrafterConfig, ray_config: RayConfig
) -> AsyncGenerator[DrafterService]:
    """Run a drafter in this actor for the duration of an `async with` block. The drafter finds
    verifiers by their actors' names."""
    prepare(config.threads, config.log_level)
    from outrider_drafter.hooks import DrafterHooks, VerifierAccess
    from outrider_drafter.server.build import build_service

    hooks = install_hooks(config.hooks, DrafterHooks())
    access = hooks.wrap_access(VerifierAccess(RayDialer(ray_config)))

    async def end(service: DrafterService) -> None:
        await service.close()
        await access.dialer.close()

    async with _built(
        partial(build_service, config, access, hooks=hooks), end, config.busy_polling_cores
    ) as service:
        _serve_metrics(service.metrics.registry, config.metrics_port, ray_config)
        yield service


def _serve_metrics(registry: CollectorRegistry, port: int, ray_config: RayConfig) -> None:
    """Serve the metrics of this actor on the address of its node, unless `port` is negative."""
    if port < 0:
        return
    from ray.util import get_node_ip_address

    serve_metrics(registry, ray_config.listen_host or get_node_ip_address(), port)


@asynccontextmanager
async def _built(
    build: Callable[[BusyCores], ServiceT],
    end: Callable[[ServiceT], Coroutine[Any, Any, None]],
    busy_polling_cores: int,
) -> AsyncGenerator[ServiceT]:
    """Build a service, yield it, and call `end` with it when the context is left. The process is
    tuned for the service, and exits if the service loses its device."""
    with BusyCores.claim(busy_polling_cores) as busy_cores:
        service = await run_in_short_thread(build, busy_cores)
        tune_process()
        busy_cores.adopt_thread()
        watch = asyncio.create_task(end_when(service.lost))
        try:
            yield service
        finally:
            watch.cancel()
            await end(service)


async def end_when(lost: asyncio.Event) -> None:
    """End this actor's process once `lost` is set, because its device was lost or its engine hangs.
    The actor's keeper then starts a replacement."""
    await lost.wait()
    exit_within(LOST_GRACE_S + EXIT_GRACE_S, EXIT_STALLED)
    await asyncio.sleep(LOST_GRACE_S)
    # On SIGTERM, Ray's workers exit with status 1 after answering their current calls.
    signal.raise_signal(signal.SIGTERM)


def prepare(threads: int, log_level: str) -> None:
    """Prepare this actor's process: write JSON logs to stderr, which Ray collects, and set OpenMP's
    environment variables. Must be called before torch is imported. `threads` is the number of
    compute threads; with 0 torch chooses it."""
    setup_logging(log_level)
    # Ray's own record factory adds a field to every record.
    logging.setLogRecordFactory(logging.LogRecord)
    # Ray sets OMP_NUM_THREADS to 1 for an actor that reserves no CPU.
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.pop("OMP_NUM_THREADS", None)
    set_openmp_spin()
