"""Connection to a router: channels in plain text or over TLS, and API-key metadata."""

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
"""Environment variable with the API key of clients that are created without one."""

TENANT_KEY: Final = "x-outrider-tenant"
"""Metadata key of the tenant, for routers that trust the tenant that callers name."""
_KEY: Final = re.compile(r"[a-z0-9_.-]+")

GrpcOptions: TypeAlias = "Sequence[tuple[str, int | str]]"


def call_metadata(
    metadata: Metadata, *, api_key: str | None = None, tenant: str | None = None
) -> Metadata:
    """Build the metadata of each call. Without a key, the API key comes from the environment.

    Raises InvalidRequestError for values that no header can carry.
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
    """Check metadata and return it as a tuple. Raises InvalidRequestError for values that no header
    can carry."""
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
    """Opens channels to one router."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        """Create a connector for the router at `address`; None as `tls` means plain text. With
        `tls`, the router's certificate must be signed by `tls.ca`, or by an authority that the
        system trusts, and name this address, or the name in `tls.names` for routers.

        Raises FailedPreconditionError (BAD_TLS).
        """
        self._address = address
        self._files = None if tls is None else TlsFiles(tls)
        named = () if tls is None else tls.names.router
        self._name = named[0] if named else ""

    def channel(self) -> grpc.Channel:
        """Open a synchronous channel. The thread that iterates over a stream also reads it, because
        gRPC's extra thread would delay a first message by 0.3 to 0.4 ms."""
        options: GrpcOptions = [*self._options(), (ChannelOptions.SingleThreadedUnaryStream, 1)]
        if self._files is None:
            return grpc.insecure_channel(self._address, options=options)
        credentials = channel_credentials(self._files)
        return grpc.secure_channel(self._address, credentials, options=options)

    def aio_channel(self) -> grpc.aio.Channel:
        """Open an asynchronous channel."""
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
    """Return whether the health service of a process says that it serves."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with RouterConnector(address, tls).channel() as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
