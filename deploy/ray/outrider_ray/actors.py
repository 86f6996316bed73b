"""The endpoints as they are made within their actors; torch is imported there and only there."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from outrider_drafter.config import DrafterConfig
from outrider_verifier.config import VerifierConfig

from outrider.logs import setup_logging
from outrider.transport.ray import RayConfig, RayDialer

if TYPE_CHECKING:
    from outrider_drafter.service import DrafterService
    from outrider_verifier.service import VerifierService


@asynccontextmanager
async def verifier_endpoint(config: VerifierConfig) -> AsyncGenerator[VerifierService]:
    """A verifier in this actor, its model loaded."""
    prepare(config.threads, config.log_level)
    from outrider_verifier.build import build_service, tune_interpreter

    service = await asyncio.to_thread(build_service, config)
    tune_interpreter()
    service.start()
    try:
        yield service
    finally:
        await service.stop()


@asynccontextmanager
async def drafter_endpoint(
    config: DrafterConfig, ray_config: RayConfig
) -> AsyncGenerator[DrafterService]:
    """A drafter in this actor, which reaches verifiers by their actors' names."""
    prepare(config.threads, config.log_level)
    from outrider_drafter.build import build_service, tune_interpreter

    dialer = RayDialer(ray_config)
    service = await asyncio.to_thread(build_service, config, dialer)
    tune_interpreter()
    try:
        yield service
    finally:
        await service.close()
        await dialer.close()


def prepare(threads: int, log_level: str) -> None:
    """Logs as JSON on stderr, which Ray keeps; the number of threads before torch reads it."""
    setup_logging(log_level)
    # Ray's own adds a field to every record.
    logging.setLogRecordFactory(logging.LogRecord)
    # Ray sets one thread for an actor that reserves no CPU.
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.pop("OMP_NUM_THREADS", None)
