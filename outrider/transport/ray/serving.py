"""Start, take-over and stop of actor hosts."""

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
from outrider.transport.ray.supervision import SUPERVISOR_REPLACED, Supervision

_MAX_CONCURRENCY = 10_000
"""Maximum number of calls that wait at a host at once; each session and exchange has a few."""


@dataclass(frozen=True, slots=True)
class RayEndpoint:
    """A running Ray actor that hosts a verifier or drafter."""

    address: str
    """Name of the actor, by which dialers find it."""
    actor: Any
    config: RayConfig
    where: ActorLocation
    supervision: Supervision

    @property
    def pid(self) -> int:
        """Process id of the actor on its node."""
        return self.where.pid

    async def drain(self, timeout_s: float) -> None:
        """Make a verifier hand over its sessions to other verifiers. Returns when it has none left,
        or after `timeout_s` seconds."""
        calls = HostCalls(self.actor, self.address, self.config)
        with contextlib.suppress(OutriderError, TimeoutError):
            async with asyncio.timeout(timeout_s + self.config.control_timeout_s):
                await calls.stream("drain", timeout_s)

    async def stop(self) -> bool:
        """Stop the endpoint, then the actor, and return True; idempotent. Return False without
        stopping them if another supervisor has taken the actor over."""
        import ray

        calls = HostCalls(self.actor, self.address, self.config)
        try:
            await calls.call("stop", self.supervision.supervisor)
        except OutriderError as error:
            if error.reason == SUPERVISOR_REPLACED:
                return False
        ray.kill(self.actor)
        return True


async def serve_verifier(
    name: str,
    factory: EndpointFactory,
    *,
    config: RayConfig | None = None,
    actor_options: Mapping[str, object] | None = None,
    supervision: Supervision | None = None,
) -> RayEndpoint:
    """Start an actor that serves a verifier, and wait until it is ready.

    `factory` is picklable and is called inside the actor. It returns an async context manager that
    yields a `VerifierEndpoint`.

    `actor_options` are Ray's options of an actor (num_cpus, num_gpus, lifetime,
    scheduling_strategy, ...). `supervision` says who may take the actor over, and when it ends
    without a supervisor; by default it never does. Raises AlreadyExistsError if the name is in use,
    UnavailableError if the actor did not start, and any error of the factory.
    """
    supervision = supervision or Supervision()
    return await _serve(name, factory, config or RayConfig(), actor_options or {}, supervision)


async def serve_drafter(
    name: str,
    factory: EndpointFactory,
    *,
    config: RayConfig | None = None,
    actor_options: Mapping[str, object] | None = None,
    supervision: Supervision | None = None,
) -> RayEndpoint:
    """Start an actor that serves a drafter, and wait until it is ready.

    The arguments and errors are those of `serve_verifier`, but `factory` returns an async context
    manager that yields a `DrafterEndpoint`.
    """
    supervision = supervision or Supervision()
    return await _serve(name, factory, config or RayConfig(), actor_options or {}, supervision)


async def claim_endpoint(
    name: str, config: RayConfig, supervision: Supervision
) -> RayEndpoint | None:
    """Take over a running actor that another process has started. Return None if there is none.

    An actor that is not ready, because the process that started it died meanwhile, is killed.
    Raises AlreadyExistsError (NAME_IN_USE) if the actor belongs to another fleet.
    """
    import ray

    try:
        host = await find_host(name, config)
    except UnavailableError:
        return None
    try:
        where: ActorLocation | None = await host.call("claim", supervision)
    except AlreadyExistsError:
        raise
    except OutriderError:
        where = None
    if where is None:
        ray.kill(host.actor)
        return None
    return RayEndpoint(name, host.actor, config, where, supervision)


async def _serve(
    name: str,
    factory: EndpointFactory,
    config: RayConfig,
    actor_options: Mapping[str, object],
    supervision: Supervision,
) -> RayEndpoint:
    import ray
    from ray.exceptions import RayError

    options = {
        "num_cpus": 0,
        **actor_options,
        "name": name,
        "namespace": config.namespace,
        "max_concurrency": _MAX_CONCURRENCY,
        # A restarted actor would have lost its state and serve sessions that it never opened.
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    try:
        host = ray.remote(EndpointHost).options(**options)
        actor: Any = host.remote(factory, config, supervision)
    except ValueError as error:
        raise AlreadyExistsError(f"actor name {name} is in use", reason="NAME_IN_USE") from error
    try:
        async with asyncio.timeout(config.start_timeout_s):
            calls = HostCalls(actor, name, config)
            where: ActorLocation = await calls.stream("start", supervision.supervisor)
    except (TimeoutError, RayError, OutriderError) as error:
        ray.kill(actor)
        if isinstance(error, OutriderError):
            raise
        raise UnavailableError(f"actor {name} did not start", reason="START_TIMEOUT") from error
    return RayEndpoint(name, actor, config, where, supervision)
