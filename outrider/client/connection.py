"""Opens connections to a router, in plain text or over TLS, and builds the metadata of calls."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import grpc
from grpc.experimental import ChannelOptions

from outrider.client.rpcs import Metadata, client_options
from outrider.errors import InvalidRequestError
from outrider.transport.grpc.credentials import channel_credentials
from outrider.transport.tls import TlsConfig, TlsFiles
from outrider.wire.checks import quote_value

API_KEY_VARIABLE: Final = "OUTRIDER_API_KEY"
"""Environment variable with the API key for clients that are created without one."""

TENANT_KEY: Final = "x-outrider-tenant"
"""Metadata key of the tenant. Only routers with `overload.tenant_from = "metadata"` read it."""
_KEY: Final = re.compile(r"[a-z0-9_.-]+")

GrpcOptions: TypeAlias = "Sequence[tuple[str, int | str]]"


def call_metadata(
    metadata: Metadata, *, api_key: str | None = None, tenant: str | None = None
) -> Metadata:
    """Return the metadata of each call: `metadata` with the API key and the tenant. If `api_key` is
    None, the key comes from the environment variable OUTRIDER_API_KEY.

    Raises InvalidRequestError for values that are not allowed in a header.
    """
    found = list(check_metadata(metadata))
    if tenant is not None:
        found.append((TENANT_KEY, _printable(tenant, "tenant", "INVALID_TENANT")))
    name, key = "api_key", api_key
    if key is None:
        name, key = API_KEY_VARIABLE, os.environ.get(API_KEY_VARIABLE, "")
    if key != "":
        key = _printable(key, name, "INVALID_API_KEY")
        found.append(("authorization", f"Bearer {key}"))
    return tuple(found)


def check_metadata(metadata: Metadata) -> Metadata:
    """Return metadata as a tuple of pairs. Raises InvalidRequestError for values that are not
    allowed in a header."""
    pairs = tuple(map(_pair, _items(metadata)))
    for key, value in pairs:
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            raise InvalidRequestError(
                "a metadata key must consist of lower-case letters, digits, '-', '_' and '.', "
                f"got {quote_value(key)}",
                reason="INVALID_METADATA",
            )
        _printable(value, f"metadata {key}", "INVALID_METADATA")
    return pairs


def _items(metadata: object) -> Iterable[object]:
    # A mapping's items are its keys, a text's its characters: nobody means these.
    if isinstance(metadata, (str, bytes, Mapping)) or not isinstance(metadata, Iterable):
        raise _no_pairs(metadata)
    return metadata


def _pair(item: object) -> tuple[str, str]:
    if not (isinstance(item, (tuple, list)) and len(item) == 2):
        raise _no_pairs(item)
    key, value = item
    return key, value


def _no_pairs(found: object) -> InvalidRequestError:
    # Not shown: it may be a secret.
    return InvalidRequestError(
        "metadata must be a sequence of pairs (key, value) of strings, "
        f"got a value of type {type(found).__name__}",
        reason="INVALID_METADATA",
    )


def _printable(value: str, what: str, reason: str) -> str:
    # Not shown: it may be a secret.
    if not (isinstance(value, str) and value and value.isascii() and value.isprintable()):
        raise InvalidRequestError(
            f"{what} must be a non-empty string of printable ASCII characters", reason=reason
        )
    return value


class RouterConnector:
    """Opens gRPC channels to one router."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        """Create a connector for the router at `address`. If `tls` is None, channels use plain
        text. Otherwise the router's certificate must be signed by `tls.ca`, or by an authority that
        the system trusts if `tls.ca` is not set. The certificate must name this address or the name
        that `tls.names` has for routers.

        Raises FailedPreconditionError (BAD_TLS).
        """
        self._address = address
        self._files = None if tls is None else TlsFiles(tls)
        named = () if tls is None else tls.names.router
        self._name = named[0] if named else ""

    def channel(self) -> grpc.Channel:
        """Open a synchronous channel. The channel option SingleThreadedUnaryStream is set: the
        thread that iterates over a stream also reads it. With gRPC's extra thread the first message
        would be 0.3 to 0.4 ms later."""
        options: GrpcOptions = [*self._options(), (ChannelOptions.SingleThreadedUnaryStream, 1)]
        if self._files is None:
            return grpc.insecure_channel(self._address, options=options)
        credentials = channel_credentials(self._files)
        return grpc.secure_channel(self._address, credentials, options=options)

    def aio_channel(self) -> grpc.aio.Channel:
        """Open a channel for asyncio."""
        if self._files is None:
            return grpc.aio.insecure_channel(self._address, options=self._options())
        credentials = channel_credentials(self._files)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options())

    def _options(self) -> GrpcOptions:
        options: list[tuple[str, int | str]] = [*client_options()]
        if self._name:
            options.append(("grpc.ssl_target_name_override", self._name))
        return options


def is_serving(address: str, tls: TlsConfig | None, timeout_s: float = 5.0) -> bool:
    """Return whether the health service of the process at `address` answers SERVING within
    `timeout_s`."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with RouterConnector(address, tls).channel() as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
