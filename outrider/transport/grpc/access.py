"""Authorisation of gRPC calls: certificate roles and credentials in metadata; health is open."""

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
    """No credentials are asked for."""


def _nobody_counts(_reason: str) -> None:
    pass


def _nobody_listens() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Roles and credentials that a server requires of its callers."""

    tls: TlsConfig = field(default_factory=TlsConfig)
    """Its certificate; without one connections are plain text and have no roles."""
    require_client: bool = True
    """Whether callers must show a certificate, and have a role that the service is for."""
    check: Callable[[Metadata], object] = _everybody
    """Looks at a call's metadata before its message is read; raises OutriderError, and counts."""
    on_refused: Callable[[str], None] = _nobody_counts
    """Hears the reason of each call that is refused for its certificate."""
    on_handshake: Callable[[], None] = _nobody_listens
    """Hears of each TLS handshake that begins, on another thread."""


class AccessGuard:
    """Applies an `AccessRules` to the calls of a server."""

    def __init__(
        self, access: AccessRules, roles: Mapping[str, tuple[CertificateRole, ...]]
    ) -> None:
        """`roles`: who a service is for, by its full name; services without an entry are for
        whoever has a certificate."""
        self._access = access
        self._roles = roles

    def check_call(self, details: grpc.HandlerCallDetails) -> None:
        """Judge a call by its metadata; its message has not been read. Raises OutriderError."""
        if _service_of(details.method) == HEALTH_SERVICE:
            return
        self._access.check(details.invocation_metadata or ())

    def role_check(self, method: str) -> Callable[[Context], None] | None:
        """Judges the callers of a method by their certificates, if there is anything to judge;
        raises PermissionDeniedError."""
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
