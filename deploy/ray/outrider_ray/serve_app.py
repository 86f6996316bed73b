"""Outrider as a Ray Serve application: `serve run outrider_ray.serve_app:app model=NAME`.

One replica replaces the launcher: it creates verifiers and drafters as actors, keeps them alive,
and its router serves OpenAI's HTTP API behind Serve's proxies. The actors outlive a replica that is
lost, and the next replica takes them over. They end with a replica that Serve stops in an orderly
way, as it does when the application is deleted, or after `orphan_timeout_s` without a replica. Each
application is a separate fleet, so scale with `max_verifiers` and `max_drafters` instead of more
replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from outrider_router.requests.service import RouterService
from ray import serve
from ray.serve import Application

from outrider import __version__
from outrider.config import from_plain
from outrider.errors import AlreadyExistsError, InvalidRequestError, UnavailableError
from outrider.process_tuning import tune_garbage_collector
from outrider.transport.ray import Supervision
from outrider_ray.actors import prepare
from outrider_ray.config import RayFleetConfig
from outrider_ray.embedded_router import EmbeddedRouter
from outrider_ray.fleet import ActorFleet, claim_members
from outrider_ray.fleet_lifecycle import supervise

logger = logging.getLogger(__name__)

MAX_ONGOING = 4096
"""Maximum number of requests that Serve lets the router have in progress. The router has its own
queue and limits."""
NAME_PAUSE_S = 0.5
"""Seconds between two attempts to start a fleet while actors of another one have its names."""
STOP_S = 30.0
"""Seconds that Serve gives a replica to end, in addition to twice the time that running requests
get: Serve waits for its own requests before the router does so for those of its gRPC API."""
_DEFAULT_LISTEN = "127.0.0.1:0"


def app(args: dict[str, Any]) -> Application:
    """Return the application. `args` are keys of `RayFleetConfig`, as in its TOML file or as
    `KEY=VALUE` on the command line.

    Raises InvalidRequestError for unknown keys and invalid values.
    """
    config = launch_config(args)
    deployment = _DEPLOYMENT.options(
        graceful_shutdown_timeout_s=2.0 * config.drain_timeout_s + STOP_S
    )
    bound: Application = deployment.bind(config)
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
    # Serve has already joined the cluster, and the actors outlive a replica.
    return replace(config, ray_address="auto", detached=True)


def fleet_identity(application: str, config: RayFleetConfig) -> str:
    """Return the identity of an application's fleet. Replicas take over the actors of earlier ones
    with the same identity only: not those of another application, nor with other settings."""
    return repr((application, __version__, config))


class Ingress:
    """Serve replica with a supervised fleet and the HTTP API of its router."""

    async def __init__(self, config: RayFleetConfig) -> None:  # type: ignore[misc]
        """Start the fleet and wait until it serves. Raises the errors of its start."""
        prepare(0, config.log_level)
        self._config = config
        self._supervision = Supervision(
            fleet=fleet_identity(serve.get_replica_context().app_name, config),
            orphan_timeout_s=config.orphan_timeout_s,
        )
        self._stop = asyncio.Event()
        self._front: asyncio.Future[EmbeddedRouter] = asyncio.get_running_loop().create_future()
        self._fleet: ActorFleet | None = None
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
        this replica. A replica whose fleet another one has taken over serves as long as it can."""
        if self._running.done():
            raise UnavailableError("the supervisor of the fleet has stopped", reason="STOPPING")
        if self._fleet is None or not self._fleet.is_taken_over:
            return
        if not self._front.result().service.readiness.is_ready:
            raise UnavailableError("the fleet of another replica has stopped", reason="STOPPING")

    async def __del__(self) -> None:
        """Drain and stop the fleet, unless the next replica has taken it over."""
        self._stop.set()
        with contextlib.suppress(Exception):
            await self._running

    async def _run(self) -> None:
        config, supervision = self._config, self._supervision
        until = time.monotonic() + max(config.start_timeout_s, config.orphan_timeout_s)
        while True:
            try:
                resume = await claim_members(config, supervision)
                return await supervise(
                    config, self._stop, self._serving, resume=resume, supervision=supervision
                )
            except AlreadyExistsError as error:
                # A replica with other settings may be about to stop, or its orphans about to end.
                if time.monotonic() > until or self._stop.is_set():
                    raise
                logger.warning("actor names in use", extra={"problem": error.message})
                await asyncio.sleep(NAME_PAUSE_S)

    def _serving(self, fleet: ActorFleet, front: EmbeddedRouter) -> None:
        self._fleet = fleet
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
