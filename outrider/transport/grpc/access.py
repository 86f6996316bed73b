"""Authorisation of gRPC calls by certificate role and by credentials in the metadata. The health
service is open to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from outrider.errors import OutriderError
from outrider.transport.grpc.credentials import names_of
from outrider.transport.grpc.error_status import Context
from outrider.transport.grpc.health import SERVICE_NAME as HEALTH_SERVICE
from outrider.transport.tls import CertificateRole, TlsConfig

Metadata: TypeAlias = "Iterable[tuple[str, str | bytes]]"


def _everybody(_metadata: Metadata) -> None:
    """Accept every call."""


def _nobody_counts(_reason: str) -> None:
    pass


def _nobody_listens() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Roles and credentials that a server requires of its callers."""

    tls: TlsConfig = field(default_factory=TlsConfig)
    """TLS settings of the server. Without a certificate, connections are plain text and callers
    have no roles."""
    require_client: bool = True
    """Whether callers must have a certificate with a role that the service accepts."""
    check: Callable[[Metadata], object] = _everybody
    """Function that checks a call's metadata before its message is read. It raises OutriderError to
    refuse the call."""
    on_refused: Callable[[str], None] = _nobody_counts
    """Called with the error reason for each call that is refused because of its certificate."""
    on_handshake: Callable[[], None] = _nobody_listens
    """Called at the beginning of each TLS handshake, on another thread."""


class AccessGuard:
    """Applies `AccessRules` to the calls of a server."""

    def __init__(
        self, access: AccessRules, roles: Mapping[str, tuple[CertificateRole, ...]]
    ) -> None:
        """`roles` maps the full name of a service to the roles that may call it. Callers with any
        certificate may call a service that is not in `roles`."""
        self._access = access
        self._roles = roles

    def check_call(self, details: grpc.HandlerCallDetails) -> None:
        """Check a call by its metadata, before its message is read. Raises OutriderError to refuse
        the call."""
        if _service_of(details.method) == HEALTH_SERVICE:
            return
        self._access.check(details.invocation_metadata or ())

    def role_check(self, method: str) -> Callable[[Context], None] | None:
        """Return a function that checks the caller's certificate for a method, or None if the
        method needs no check. The function raises PermissionDeniedError if no role of the
        certificate may call the method."""
        roles = self._roles.get(_service_of(method), ())
        if not roles or not self._access.require_client or self._access.tls.cert is None:
            return None

        def check(context: Context) -> None:
            try:
                self._access.tls.check_caller(names_of(context), roles)
            except OutriderError as error:
                self._access.on_refused(error.reason)
                raise

        return check


def _service_of(method: str) -> str:
    return method.strip("/").rpartition("/")[0]
