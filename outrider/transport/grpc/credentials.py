"""gRPC credentials from TLS files, and the names in a caller's certificate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import grpc

from outrider.errors import FailedPreconditionError
from outrider.transport.grpc.error_status import Context
from outrider.transport.tls import TlsConfig, TlsFiles, TlsMaterial

_NAMES = "x509_subject_alternative_name"


def server_credentials(
    config: TlsConfig,
    *,
    require_client: bool,
    on_handshake: Callable[[], None] = lambda: None,
) -> grpc.ServerCredentials:
    """Return server credentials that read the certificate files again when they have changed, so
    that each new connection uses their present content.

    `on_handshake` is called at the beginning of each TLS handshake, on a thread of gRPC; the end of
    a handshake cannot be observed. Raises FailedPreconditionError (BAD_TLS) if files are missing or
    invalid.
    """
    if config.cert is None or (require_client and config.ca is None):
        raise FailedPreconditionError(
            "a server needs tls.cert and tls.key, and tls.ca to judge its callers by",
            reason="BAD_TLS",
        )
    files = TlsFiles(config)
    told = files.current_material()

    def changed() -> grpc.ServerCertificateConfiguration | None:  # None: as before
        nonlocal told
        # An exception here would end the connection without any message.
        with contextlib.suppress(Exception):
            on_handshake()
            found = files.current_material()
            if found is not told:
                told = found
                return _configuration(found, require_client=require_client)
        return None

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(told, require_client=require_client), fetch, require_client
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Return the credentials of a client's channel, made from the present content of the files."""
    found = files.current_material()
    return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)


def names_of(context: Context) -> tuple[str, ...]:
    """Return the names in the certificate of an RPC's caller. The result is empty if the caller has
    no certificate."""
    values = context.auth_context().get(_NAMES, ())
    return tuple(value.decode("utf-8", "replace") for value in values)


def _configuration(
    material: TlsMaterial, *, require_client: bool
) -> grpc.ServerCertificateConfiguration:
    assert material.key is not None and material.cert is not None, "checked by the caller"
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.cert)], root_certificates=material.ca if require_client else None
    )
