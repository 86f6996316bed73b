"""Actor keeper: replaces an actor of a given name whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from outrider.errors import OutriderError
from outrider.transport.ray import SUPERVISOR_REPLACED, ActorLocation, RayEndpoint

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Seconds between two checks of an actor."""
MAX_HANG_S = 30.0
"""Time in seconds without a response of an actor's event loop after which the actor is killed. The
keeper then starts a replacement."""
MIN_BACKOFF_S = 0.5
MAX_PAUSE_S = 30.0
MIN_STABLE_S = 60.0
"""Seconds after which a running actor counts as stable, so that its next replacement has the
shortest pause again."""


def next_pause(pause_s: float, ran_s: float) -> float:
    """Return the seconds to wait before replacing an actor that ran for `ran_s` seconds, after a
    previous pause of `pause_s`."""
    return MIN_BACKOFF_S if ran_s > MIN_STABLE_S else min(MAX_PAUSE_S, 2.0 * pause_s)


class ActorKeeper:
    """Keeps one named Ray actor running: starts a replacement whenever the actor dies."""

    def __init__(self, name: str, serve: Callable[[], Awaitable[RayEndpoint]]) -> None:
        """Create a keeper of the actor `name`. `serve` starts the actor, or finds a running one,
        and waits until it is ready."""
        self.name = name
        self._serve = serve
        self._endpoint: RayEndpoint | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_taken_over = False

    @property
    def is_taken_over(self) -> bool:
        """Whether another supervisor has taken the actor over; this keeper then leaves it alone."""
        return self._is_taken_over

    @property
    def where(self) -> ActorLocation | None:
        """Location of the actor, or None while no actor is ready."""
        return None if self._endpoint is None else self._endpoint.where

    async def start(self) -> None:
        """Start the actor and wait until it is ready. Raises UnavailableError, or the error with
        which the actor's server failed to start."""
        began = time.monotonic()
        self._endpoint = await self._serve()
        seconds = round(time.monotonic() - began, 2)
        facts = {"actor": self.name, "seconds": seconds} | asdict(self._endpoint.where)
        logger.info("actor started", extra=facts)

    def keep(self) -> None:
        """Start a task that replaces the actor whenever it dies."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Stop the actor. With `drain_timeout_s` above 0, a verifier first gets that many seconds
        to hand over its sessions."""
        await self.detach()
        if self._endpoint is not None:
            if drain_timeout_s:
                await self._endpoint.drain(drain_timeout_s)
            self._is_taken_over = not await self._endpoint.stop()

    async def detach(self) -> None:
        """Stop replacing the actor, which continues to run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _keep(self) -> None:
        pause_s = MIN_BACKOFF_S / 2.0
        while True:
            began = time.monotonic()
            if self._endpoint is not None:
                self._is_taken_over = await _lost(self._endpoint)
                self._endpoint = None
                if self._is_taken_over:
                    logger.warning("actor taken over", extra={"actor": self.name})
                    return
                logger.warning("actor lost", extra={"actor": self.name})
            pause_s = next_pause(pause_s, time.monotonic() - began)
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except OutriderError as error:
                # One such error is that Ray has not yet freed the actor's name.
                problem = {"actor": self.name, "problem": error.message, "pause_s": pause_s}
                logger.error("actor start failed", extra=problem)


async def _lost(endpoint: RayEndpoint) -> bool:
    """Renew the supervision of an actor until the actor is dead; then return False. Return True as
    soon as another supervisor has taken the actor over."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    actor: Any = endpoint.actor
    while True:
        try:
            async with asyncio.timeout(MAX_HANG_S):
                reply = await actor.renew.remote(endpoint.supervision.supervisor)
            if reply.error is not None and reply.error.reason == SUPERVISOR_REPLACED:
                return True
        except ActorDiedError:
            return False
        except RayError as error:
            logger.warning(
                "actor did not answer",
                extra={"actor": endpoint.address, "problem": type(error).__name__},
            )
        except TimeoutError:
            logger.error("actor hung; it is killed", extra={"actor": endpoint.address})
            ray.kill(actor)
        await asyncio.sleep(POLL_INTERVAL_S)
