"""Outrider as a Ray Serve application: `serve run outrider_ray.serve_app:app model=NAME`.

One replica replaces the launcher: it creates verifiers and drafters as actors, keeps them alive,
and its router serves OpenAI's HTTP API behind Serve's proxies. When the replica ends, its actors
always end too, and Serve starts the next replica. Each replica is a separate fleet, so scale with
`max_verifiers` and `max_drafters` instead of more replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from outrider_router.requests.service import RouterService
from ray import serve
from ray.serve import Application

from outrider.config import from_plain
from outrider.errors import AlreadyExistsError, InvalidRequestError, UnavailableError
from outrider.process_tuning import tune_garbage_collector
from outrider_ray.actors import prepare
from outrider_ray.config import RayFleetConfig
from outrider_ray.embedded_router import EmbeddedRouter
from outrider_ray.fleet import ActorFleet
from outrider_ray.fleet_lifecycle import supervise

logger = logging.getLogger(__name__)

MAX_ONGOING = 4096
"""Maximum number of requests that Serve lets the router have in progress. The router has its own
queue and limits."""
NAME_PAUSE_S = 0.5
_DEFAULT_LISTEN = "127.0.0.1:0"


def app(args: dict[str, Any]) -> Application:
    """Return the application. `args` are keys of `RayFleetConfig`, as in its TOML file or as
    `KEY=VALUE` on the command line.

    Raises InvalidRequestError for unknown keys and invalid values.
    """
    bound: Application = _DEPLOYMENT.bind(launch_config(args))
    return bound


def launch_config(args: Mapping[str, Any]) -> RayFleetConfig:
    """Return the configuration of a fleet on Serve's cluster. Raises InvalidRequestError."""
    hints = get_type_hints(RayFleetConfig)
    values = {name: _typed(hints.get(name), name, value) for name, value in args.items()}
    config = from_plain(RayFleetConfig, {"listen": _DEFAULT_LISTEN} | values)
    if config.detached:
        raise InvalidRequestError(
            "detached must not be set: Ray Serve manages the fleet of a Serve application",
            reason="INVALID_CONFIG",
        )
    # Serve has already joined the cluster.
    return replace(config, ray_address="auto")


class Ingress:
    """Serve replica with a supervised fleet and the HTTP API of its router."""

    async def __init__(self, config: RayFleetConfig) -> None:  # type: ignore[misc]
        """Start the fleet and wait until it serves. Raises the errors of its start."""
        prepare(0, config.log_level)
        self._config = config
        self._stop = asyncio.Event()
        self._front: asyncio.Future[EmbeddedRouter] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run())
        await asyncio.wait((self._front, self._running), return_when=asyncio.FIRST_COMPLETED)
        if not self._front.done():
            await self._running
            raise UnavailableError("the fleet stopped before it was ready", reason="STOPPING")

    def __serve_build_asgi_app__(self) -> Any:
        """Return the router's HTTP API. Serve calls this after the constructor."""
        from outrider_router.api.http.app import make_app

        service: RouterService = self._front.result().service
        return make_app(service)

    async def check_health(self) -> None:
        """Raise UnavailableError if the fleet is no longer supervised, upon which Serve replaces
        this replica."""
        if self._running.done():
            raise UnavailableError("the supervisor of the fleet has stopped", reason="STOPPING")

    async def __del__(self) -> None:
        """Drain and stop the fleet."""
        self._stop.set()
        with contextlib.suppress(Exception):
            await self._running

    async def _run(self) -> None:
        while True:
            try:
                return await supervise(self._config, self._stop, self._serving)
            except AlreadyExistsError as error:
                # Ray is about to end the actors of the previous replica.
                logger.warning("actor name not registered yet", extra={"problem": error.message})
                await asyncio.sleep(NAME_PAUSE_S)

    def _serving(self, _fleet: ActorFleet, front: EmbeddedRouter) -> None:
        tune_garbage_collector()
        self._front.set_result(front)


def _typed(hint: Any, name: str, value: Any) -> Any:
    """Convert the text of a `KEY=VALUE` argument to the type of its key."""
    if not isinstance(value, str) or hint is str:
        return value
    if name == "methods":
        return [part for part in value.split(",") if part]
    with contextlib.suppress(ValueError):
        return json.loads(value)
    return value


_DEPLOYMENT: Any = serve.deployment(
    name="outrider",
    num_replicas=1,
    max_ongoing_requests=MAX_ONGOING,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=5.0,
)(serve.ingress()(Ingress))
