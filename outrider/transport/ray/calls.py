"""Ray actor calls with deadlines and typed errors."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.error_codec import from_status
from outrider.transport.heartbeat import cancel_if_silent
from outrider.transport.ray.options import RayConfig


class HostCalls:
    """Makes calls to the Ray actor that hosts an endpoint (`EndpointHost`)."""

    def __init__(self, actor: Any, address: str, config: RayConfig) -> None:
        self.actor = actor
        self.address = address
        self.config = config

    async def call(self, method: str, *args: object) -> Any:
        """Call a method within the control timeout. Raises UnavailableError if the actor is gone,
        and DeadlineExceededError if it does not answer in time."""
        try:
            async with asyncio.timeout(self.config.control_timeout_s):
                return await self._result(method, args, UnavailableError)
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.address} did not answer within {self.config.control_timeout_s:g} s",
                reason="TIMEOUT",
            ) from None

    async def poll(self, method: str, *args: object) -> Any:
        """Call a method that the host answers within a heartbeat interval even if it has no result
        yet.

        Raises ConnectionLostError if the actor is gone or silent.
        """
        task = asyncio.create_task(self._result(method, args, ConnectionLostError))
        return await cancel_if_silent(task, self.address, self.config.heartbeat)

    async def stream(self, method: str, *args: object) -> Any:
        """Call a method that the host answers only when its endpoint has space. There is no
        timeout, so the caller must limit the wait. Raises ConnectionLostError if the actor is
        gone."""
        return await self._result(method, args, ConnectionLostError)

    async def _result(
        self, method: str, args: tuple[object, ...], lost: type[OutriderError]
    ) -> Any:
        from ray.exceptions import RayError

        try:
            reply = await getattr(self.actor, method).remote(*args)
        except RayError as error:
            raise lost(f"lost {self.address}: {type(error).__name__}", reason="PEER_LOST") from None
        if reply.error is not None:
            raise from_status(reply.error)
        return reply.value


def actor_named(name: str, namespace: str) -> Any:
    """Return the handle of the actor `name`. Raises UnavailableError if there is none or it is
    being removed."""
    import ray

    try:
        return ray.get_actor(name, namespace=namespace)
    # While a job ends, Ray removes its classes before its actors' names; an assertion in Ray then
    # fails.
    except (ValueError, AssertionError):
        raise UnavailableError(f"no actor named {name}", reason="UNREACHABLE") from None


async def find_host(address: str, config: RayConfig) -> HostCalls:
    """Find the Ray actor named `address` and return a `HostCalls` for it. Raises UnavailableError
    if there is none or the look-up hangs."""
    try:
        async with asyncio.timeout(config.control_timeout_s):
            actor = await asyncio.to_thread(actor_named, address, config.namespace)
    except TimeoutError:
        raise UnavailableError(f"the look-up of {address} hangs", reason="UNREACHABLE") from None
    return HostCalls(actor, address, config)
