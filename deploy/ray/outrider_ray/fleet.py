"""Places the actors, and puts a new one with the same name in the place of a dead one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from outrider.errors import OutriderError
from outrider.transport.ray import (
    EndpointFactory,
    RayEndpoint,
    serve_drafter,
    serve_verifier,
)
from outrider_ray.actors import drafter_endpoint, verifier_endpoint
from outrider_ray.config import (
    DRAFTER,
    VERIFIER,
    LaunchConfig,
    Role,
    drafter_config,
    verifier_config,
)
from outrider_ray.places import Places, with_gpu_share

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Time between two looks at an actor."""
HANG_S = 30.0
"""An actor whose event loop answers nothing for this long is killed, and by that replaced."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
STEADY_S = 60.0
"""An actor that ran for this long is replaced after the first pause again."""


def next_pause(pause_s: float, ran_s: float) -> float:
    """Pause before the replacement of an actor that ran for `ran_s`, given the one before."""
    return FIRST_PAUSE_S if ran_s > STEADY_S else min(MAX_PAUSE_S, 2.0 * pause_s)


class Keeper:
    """Keeps an actor of one name alive."""

    def __init__(self, name: str, serve: Callable[[], Awaitable[RayEndpoint]]) -> None:
        """`serve` starts the actor and waits until it is ready."""
        self.name = name
        self._serve = serve
        self._endpoint: RayEndpoint | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the actor. Raises what its endpoint raised, or UnavailableError."""
        began = time.monotonic()
        self._endpoint = await self._serve()
        seconds = round(time.monotonic() - began, 2)
        facts = {"actor": self.name, "seconds": seconds} | asdict(self._endpoint.where)
        logger.info("actor is ready", extra=facts)

    def keep(self) -> None:
        """Begin to replace the actor when it dies."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Stop the actor, within a bounded time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._endpoint is not None:
            await self._endpoint.stop()

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S / 2.0
        while True:
            began = time.monotonic()
            if self._endpoint is not None:
                await _death(self._endpoint.actor, self.name)
                self._endpoint = None
            pause_s = next_pause(pause_s, time.monotonic() - began)
            logger.warning("actor is gone", extra={"actor": self.name, "pause_s": pause_s})
            await asyncio.sleep(pause_s)
            try:
                await self.start()
            except OutriderError as error:
                # Among them that Ray has not yet freed the name.
                problem = {"actor": self.name, "problem": error.message}
                logger.error("actor does not start", extra=problem)


class Fleet:
    """The actors of one launcher."""

    def __init__(self, config: LaunchConfig) -> None:
        """Ray must be up. Raises InvalidRequestError where the parts do not fit together, and
        UnavailableError where there is no GPU for those that compute on one.
        """
        config = with_gpu_share(config)
        self._ray_config = config.ray
        self._places = Places(config)
        verifier = partial(verifier_endpoint, verifier_config(config))
        self._keepers = [Keeper(VERIFIER, partial(self._serve_verifier, verifier))]
        own = drafter_config(config)
        if own is not None:
            drafter = partial(drafter_endpoint, own, self._ray_config)
            self._keepers.append(Keeper(DRAFTER, partial(self._serve_drafter, drafter)))

    async def start(self) -> None:
        """Reserve places, then start all actors at once; returns when all are ready."""
        await self._places.reserve()
        await asyncio.gather(*(keeper.start() for keeper in self._keepers))
        for keeper in self._keepers:
            keeper.keep()

    async def stop(self) -> None:
        """Stop all actors, then give their places back."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers))
        await self._places.release()

    async def _serve_verifier(self, factory: EndpointFactory) -> RayEndpoint:
        options = self._places.options(Role.VERIFIER)
        return await serve_verifier(
            VERIFIER, factory, config=self._ray_config, actor_options=options
        )

    async def _serve_drafter(self, factory: EndpointFactory) -> RayEndpoint:
        options = self._places.options(Role.DRAFTER)
        return await serve_drafter(DRAFTER, factory, config=self._ray_config, actor_options=options)


async def _death(actor: Any, name: str) -> None:
    """Return once the actor is dead."""
    import ray
    from ray.exceptions import ActorDiedError, RayError

    while True:
        try:
            async with asyncio.timeout(HANG_S):
                await actor.__ray_ready__.remote()
        except ActorDiedError:
            return
        except RayError as error:
            logger.warning("actor is away", extra={"actor": name, "problem": type(error).__name__})
        except TimeoutError:
            logger.error("actor hangs; killing it", extra={"actor": name})
            ray.kill(actor)
        await asyncio.sleep(LOOK_S)
