"""Forwarding of resumed streams to the router of the fleet that has the request.

A router that does not have a request asks all other routers at once. A router that has it answers
with the metadata field `FOUND_KEY` and then with the stream. A forwarded call carries
`FORWARDED_KEY` and is never forwarded again. It also carries the client's credentials, by which the
other router checks the tenant itself. Addresses come from the configuration and from DNS, never
from clients.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import grpc

from outrider.errors import (
    InternalError,
    InvalidMessageError,
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.grpc import GrpcDialer
from outrider.transport.grpc.error_status import to_lost_error
from outrider.transport.tls import CertificateRole
from outrider.wire.inference_response_codec import resumed_event_from_pb
from outrider.wire.v1 import inference_pb2 as pb
from outrider_router.base.metrics import RouterMetrics
from outrider_router.base.reasons import ForwardOutcome
from outrider_router.base.tenants import AUTHORIZATION_KEY, TENANT_KEY
from outrider_router.requests.parsed_answer import EventWriter

Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"
ResumedStream: TypeAlias = (
    "grpc.aio.UnaryStreamCall[pb.ResumeStreamRequest, pb.ResumeStreamResponse]"
)

FORWARDED_KEY: Final = "x-outrider-forwarded"
"""Metadata key of calls that a router forwards. They are answered here or not at all."""
FOUND_KEY: Final = "x-outrider-found"
"""Key of the initial metadata of forwarded calls whose request this router has."""
LOOKUP_TIMEOUT_S = 2.0
"""Time in seconds within which another router must say whether it has a request."""
MAX_LOOKUPS = 32
"""Largest number of requests that are looked up on other routers at the same time. Further ones
wait.
"""
UNREACHABLE_RETRY_S = 1.0
"""Retry hint in seconds if a router that may have the request does not answer."""
_RESUME_STREAM = "/outrider.wire.v1.InferenceService/ResumeStream"
_CREDENTIALS = (AUTHORIZATION_KEY, TENANT_KEY)
"""Metadata fields that identify a client."""


def is_forwarded(metadata: Metadata) -> bool:
    """Return whether another router has forwarded the call with this metadata."""
    return any(key == FORWARDED_KEY for key, _ in metadata)


class StreamForwarder:
    """Finds the router that has a request, and passes its stream on. Asyncio thread only."""

    def __init__(
        self,
        addresses: Callable[[], Collection[str]],
        dialer: GrpcDialer,
        metrics: RouterMetrics,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
    ) -> None:
        """Create a forwarder. `addresses` returns the addresses (HOST:PORT) of the fleet's routers;
        this router's own may be among them. `dialer` opens channels to them.
        """
        self._addresses = addresses
        self._dialer = dialer
        self._metrics = metrics
        self._lookup_timeout_s = lookup_timeout_s
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._users: Counter[str] = Counter()
        """Number of streams that use the channel to an address."""

    async def forward_stream(
        self,
        request: pb.ResumeStreamRequest,
        metadata: Metadata,
        write: EventWriter,
        *,
        timeout_s: float | None,
    ) -> None:
        """Pass the stream of a request from the router that has it to `write`.

        `metadata` is that of the client's call, and `timeout_s` its remaining time in seconds or
        None. Raises the error with which the other router ends the stream, NotFoundError if no
        router has the request, and UnavailableError (ROUTER_UNREACHABLE) if a router that may have
        it does not answer.
        """
        passed = tuple((key, value) for key, value in metadata if key in _CREDENTIALS)
        passed = (*passed, (FORWARDED_KEY, "1"))

        def open_call(channel: grpc.aio.Channel) -> ResumedStream:
            method: grpc.aio.UnaryStreamMultiCallable[
                pb.ResumeStreamRequest, pb.ResumeStreamResponse
            ] = channel.unary_stream(
                _RESUME_STREAM,
                request_serializer=pb.ResumeStreamRequest.SerializeToString,
                response_deserializer=pb.ResumeStreamResponse.FromString,
            )
            return method(request, metadata=passed, timeout=timeout_s)

        async with self._open_channels(sorted(self._addresses())) as channels:
            address, stream = await self._find(channels, open_call, request.request_id)
            try:
                await _pass_on(address, stream, write)
            finally:
                stream.cancel()

    @asynccontextmanager
    async def _open_channels(
        self, addresses: Collection[str]
    ) -> AsyncGenerator[dict[str, grpc.aio.Channel]]:
        """Yield a channel to each address. Streams share the channels, which are closed after the
        last one: resumptions are rare, and a later one connects at once to a router that was down.
        """
        self._users.update(addresses)
        try:
            yield {
                address: self._dialer.channel(address, CertificateRole.ROUTER)
                for address in addresses
            }
        finally:
            self._users.subtract(addresses)
            unused = [address for address in addresses if not self._users[address]]
            for address in unused:
                del self._users[address]
                await self._dialer.close_channel(address)

    async def _find(
        self,
        channels: Mapping[str, grpc.aio.Channel],
        open_call: Callable[[grpc.aio.Channel], ResumedStream],
        request_id: str,
    ) -> tuple[str, ResumedStream]:
        """Ask all routers, and return the stream of the one that has the request, with its
        address.
        """
        # Without a known address, DNS has not answered yet.
        unreachable = [] if channels else ["no other router is known yet"]
        try:
            async with asyncio.timeout(self._lookup_timeout_s), self._lookups:
                calls = {address: open_call(channel) for address, channel in channels.items()}
                found = await _first_found(calls, unreachable)
        except TimeoutError:
            found = None
            unreachable.append("no answer in time")
        if found is not None:
            self._count(ForwardOutcome.FOUND)
            return found
        if unreachable:
            self._count(ForwardOutcome.UNREACHABLE)
            raise UnavailableError(
                f"request {request_id!r} is not here, and a router that may have it does not "
                f"answer: {unreachable[0]}",
                reason="ROUTER_UNREACHABLE",
                retry_after_s=UNREACHABLE_RETRY_S,
            )
        self._count(ForwardOutcome.NOT_FOUND)
        raise NotFoundError(
            f"no resumable request {request_id!r} is running or ended recently", reason="NO_STREAM"
        )

    def _count(self, outcome: ForwardOutcome) -> None:
        self._metrics.forwarded_streams.labels(outcome).inc()


async def _first_found(
    calls: Mapping[str, ResumedStream], unreachable: list[str]
) -> tuple[str, ResumedStream] | None:
    """Return the first call whose router has the request, with its address, or None. Cancel all
    others, and add the reasons of routers that do not say whether they have it to `unreachable`.
    """
    asked = [asyncio.create_task(_ask(address, call)) for address, call in calls.items()]
    found = None
    try:
        for answer in asyncio.as_completed(asked):
            said = await answer
            if isinstance(said, str):
                found = said
                break
            if not isinstance(said, NotFoundError):
                unreachable.append(said.message)
    finally:
        for task in asked:
            task.cancel()
        for address, call in calls.items():
            if address != found:
                call.cancel()
    return None if found is None else (found, calls[found])


async def _ask(address: str, call: ResumedStream) -> str | OutriderError:
    """Wait until a router says whether it has the request. Return its address if it has, otherwise
    the error.
    """
    try:
        if any(key == FOUND_KEY for key, _ in await call.initial_metadata() or ()):
            return address
        await call.read()
    except grpc.aio.AioRpcError as error:
        return to_lost_error(error, peer=address)
    return UnavailableError(f"{address} does not answer forwarded calls", reason="NOT_FORWARDED")


async def _pass_on(address: str, call: ResumedStream, write: EventWriter) -> None:
    try:
        while isinstance(message := await call.read(), pb.ResumeStreamResponse):
            await write(resumed_event_from_pb(message))
    except grpc.aio.AioRpcError as error:
        raise to_lost_error(error, peer=address) from None
    except InvalidMessageError as error:
        raise InternalError(
            f"the answer of {address} is malformed: {error.message}", reason="BAD_RESPONSE"
        ) from error
