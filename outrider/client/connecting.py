"""How a client reaches a router: in plain text or by TLS, and with which API key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, TypeAlias

import grpc

from outrider.client.calls import Metadata, client_options
from outrider.errors import InvalidRequestError
from outrider.transport.grpc.credentials import channel_credentials
from outrider.transport.tls import Role, TlsConfig, TlsFiles

API_KEY_VARIABLE: Final = "OUTRIDER_API_KEY"
"""Environment variable with the key of clients that are given none."""

Options: TypeAlias = "Sequence[tuple[str, int | str]]"


def call_metadata(metadata: Metadata, api_key: str | None) -> Metadata:
    """What goes with each call. Without a key the environment may name one.

    Raises InvalidRequestError for a key that no header can carry.
    """
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    if not key:
        return metadata
    if not (key.isascii() and key.isprintable()):
        raise InvalidRequestError("an API key is printable ASCII", reason="INVALID_API_KEY")
    return (*metadata, ("authorization", f"Bearer {key}"))


class Door:
    """Opens channels to one router."""

    def __init__(self, address: str, tls: TlsConfig | None) -> None:
        """With `tls`, the router's certificate must come from `tls.ca`, or from an authority that
        the system knows, and be for this address, or for the name in `tls.names` for routers.

        Raises FailedPreconditionError (BAD_TLS).
        """
        self._address = address
        self._files = None if tls is None else TlsFiles(tls)
        named = () if tls is None else tls.names.get(Role.ROUTER, ())
        self._name = named[0] if named else ""

    def channel(self) -> grpc.Channel:
        """A channel of the synchronous kind."""
        if self._files is None:
            return grpc.insecure_channel(self._address, options=self._options())
        credentials = channel_credentials(self._files)
        return grpc.secure_channel(self._address, credentials, options=self._options())

    def aio_channel(self) -> grpc.aio.Channel:
        """A channel of the asynchronous kind."""
        if self._files is None:
            return grpc.aio.insecure_channel(self._address, options=self._options())
        credentials = channel_credentials(self._files)
        return grpc.aio.secure_channel(self._address, credentials, options=self._options())

    def _options(self) -> Options:
        options: list[tuple[str, int | str]] = [*client_options()]
        if self._name:
            options.append(("grpc.ssl_target_name_override", self._name))
        return options
