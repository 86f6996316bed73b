"""Start, lookup and stop of actor hosts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.errors import AlreadyExistsError, OutriderError, UnavailableError
from outrider.transport.ray.calls import HostCalls, find_host
from outrider.transport.ray.host import ActorLocation, EndpointFactory, EndpointHost
from outrider.transport.ray.options import RayConfig

_MAX_CONCURRENCY = 10_000
"""Calls that may wait at a host at once: a few per session and exchange."""


@dataclass(frozen=True, slots=True)
class RayEndpoint:
    """A running actor host."""

    address: str
    """The actor's name, by which dialers reach it."""
    actor: Any
    config: RayConfig
    where: ActorLocation

    @property
    def pid(self) -> int:
        """Id of the actor's process on its node."""
        return self.where.pid

    async def drain(self, timeout_s: float) -> None:
        """Have a verifier hand its sessions to others; returns when it has none, or in the end."""
        calls = HostCalls(self.actor, self.address, self.config)
        with contextlib.suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(timeout_s + self.config.control_timeout_s):
                await calls.stream("drain", timeout_s)

    async def stop(self) -> None:
        """Stop the endpoint, then the actor; idempotent."""
        import ray

        with contextlib.suppress(OutriderError):
            await HostCalls(self.actor, self.address, self.config).call("stop")
        ray.kill(self.actor)


async def serve_verifier(
    name: str,
    factory: EndpointFactory,
    *,
    config: RayConfig | None = None,
    actor_options: Mapping[str, object] | None = None,
) -> RayEndpoint:
    """Start an actor that serves the verifier that `factory` makes; waits until it is ready.

    factory: picklable; called inside the actor, its context gives a `VerifierEndpoint`.
    actor_options: Ray's own (num_cpus, num_gpus, lifetime, scheduling_strategy, ...).
    Raises AlreadyExistsError (name in use), UnavailableError (it did not start), or what the
    factory raised.
    """
    return await _serve(name, factory, config or RayConfig(), actor_options or {})


async def serve_drafter(
    name: str,
    factory: EndpointFactory,
    *,
    config: RayConfig | None = None,
    actor_options: Mapping[str, object] | None = None,
) -> RayEndpoint:
    """Like `serve_verifier`, for a factory of a `DrafterEndpoint`."""
    return await _serve(name, factory, config or RayConfig(), actor_options or {})


async def find_endpoint(name: str, config: RayConfig) -> RayEndpoint | None:
    """A running actor that another process has started; None if there is none.

    One that is not ready, because whoever started it died meanwhile, is killed.
    """
    import ray

    try:
        host = await find_host(name, config)
    except UnavailableError:
        return None
    try:
        where: ActorLocation | None = await host.call("location")
    except OutriderError:
        where = None
    if where is None:
        ray.kill(host.actor)
        return None
    return RayEndpoint(name, host.actor, config, where)


async def _serve(
    name: str, factory: EndpointFactory, config: RayConfig, actor_options: Mapping[str, object]
) -> RayEndpoint:
    import ray
    from ray.exceptions import RayError

    options = {
        "num_cpus": 0,
        **actor_options,
        "name": name,
        "namespace": config.namespace,
        "max_concurrency": _MAX_CONCURRENCY,
        # State is lost with the process: a restarted actor would serve sessions it never opened.
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    try:
        actor: Any = ray.remote(EndpointHost).options(**options).remote(factory, config)
    except ValueError as error:
        raise AlreadyExistsError(f"actor name {name} is in use", reason="NAME_IN_USE") from error
    try:
        async with asyncio.timeout(config.start_timeout_s):
            where: ActorLocation = await HostCalls(actor, name, config).stream("start")
    except (TimeoutError, RayError, OutriderError) as error:
        ray.kill(actor)
        if isinstance(error, OutriderError):
            raise
        raise UnavailableError(f"actor {name} did not start", reason="START_TIMEOUT") from error
    return RayEndpoint(name, actor, config, where)
