"""Lifecycle of a fleet of Ray actors: starts it, serves until a signal, drains and stops it.

It runs in the launcher's process or in a supervisor actor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from outrider_router.config import RouterConfig

from outrider.transport.ray import Supervision
from outrider_ray.config import RayFleetConfig
from outrider_ray.embedded_router import EmbeddedRouter, load_router_config, serve_front
from outrider_ray.fleet import ActorFleet
from outrider_ray.scaler import FleetScaler

logger = logging.getLogger(__name__)

ServingCallback = Callable[[ActorFleet, EmbeddedRouter], None]
"""Function that is called once clients are served."""


async def supervise(
    config: RayFleetConfig,
    stop: asyncio.Event,
    on_serving: ServingCallback,
    *,
    resume: bool = False,
    supervision: Supervision | None = None,
) -> None:
    """Start a fleet and its router, serve clients until `stop` is set, then drain and stop the
    fleet. Ray must have been initialised.

    With `resume`, take over the running actors of a supervisor that died; missing actors are
    created while clients are served. `supervision` says who else may take the actors over, and
    when they end without a supervisor. Raises OutriderError if the fleet does not start.
    """
    # A missing file is reported before models are loaded.
    router = await load_router_config(config)
    fleet = ActorFleet(config, supervision or Supervision())
    try:
        if resume:
            await fleet.resume()
        elif not await _unless(stop, fleet.start()):
            return await fleet.stop()
        await _serve_clients(config, router, fleet, stop, on_serving)
    except BaseException:
        # Leave resumed actors running for the next attempt.
        await (fleet.detach() if resume else fleet.stop())
        raise
    await fleet.stop()


async def _serve_clients(
    config: RayFleetConfig,
    router: RouterConfig,
    fleet: ActorFleet,
    stop: asyncio.Event,
    on_serving: ServingCallback,
) -> None:
    async with serve_front(config, router) as front:
        scaler = FleetScaler(config, fleet, front.service)
        scaler.introduce()
        scaling = asyncio.create_task(scaler.run())
        on_serving(fleet, front)
        await stop.wait()
        scaling.cancel()
        await asyncio.wait((scaling,))
        logger.info("draining", extra={"running": len(front.service.running_requests)})
        done = await front.service.drain(config.drain_timeout_s)
        logger.info("stopping", extra={"drained": done})


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run the work, but cancel it when `stop` is set. Return whether the work was finished."""
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
