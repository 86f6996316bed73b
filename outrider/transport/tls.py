"""TLS configuration and certificate roles of all processes, independent of gRPC.

All processes of a fleet have certificates of one authority, with their role as a name
(`subjectAltName`). Clients and servers accept each other by role, on any host. Certificates
therefore need no addresses, and a drafter's certificate cannot open a session.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from outrider.errors import FailedPreconditionError, InvalidRequestError, PermissionDeniedError

logger = logging.getLogger(__name__)

NAME_SUFFIX: Final = ".outrider.internal"
SPIFFE_PREFIX: Final = "spiffe://outrider/role/"
MAX_FILE_BYTES: Final = 1 << 20
"""Maximum bytes of one certificate or key file."""


class CertificateRole(StrEnum):
    """Roles that a certificate can grant."""

    ROUTER = "router"
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    OPERATOR = "operator"
    """Operators, who add and remove drafters and read metrics."""
    CLIENT = "client"
    """Clients of the API, if the client API requires certificates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNames:
    """Keys of a table `[tls.names]`: names (DNS or URI) in certificates by role, in place of
    ROLE.outrider.internal and spiffe://outrider/role/ROLE."""

    router: tuple[str, ...] = ()
    """Names of routers. The SDK checks a router's certificate for the first one instead of the
    address."""
    verifier: tuple[str, ...] = ()
    """Names of verifiers. Routers and drafters check for the first one."""
    drafter: tuple[str, ...] = ()
    """Names of drafters. Routers check for the first one."""
    operator: tuple[str, ...] = ()
    """Names of operators."""
    client: tuple[str, ...] = ()
    """Names of clients."""

    def __post_init__(self) -> None:
        for role in CertificateRole:
            if not all(self.names_for_role(role)):
                raise ValueError(f"tls.names.{role}: a name must not be empty")

    def names_for_role(self, role: CertificateRole) -> tuple[str, ...]:
        """Return the configured names of a role; empty if it has none."""
        names: tuple[str, ...] = getattr(self, role.value)
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Keys of a table `[tls]`. Without any file there is no TLS."""

    cert: Path | None = None
    """Certificate of this process (PEM), followed by the intermediate certificates."""
    key: Path | None = None
    """Private key of the certificate (PEM, not encrypted)."""
    ca: Path | None = None
    """Certificate authorities (PEM) that must have signed the certificates of other processes."""
    client_auth: bool = False
    """Whether the client API requires client certificates. The other ports of a fleet always do."""
    names: RoleNames = RoleNames()
    """Names in certificates by role, for authorities with naming rules of their own."""

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise ValueError("tls.cert and tls.key go together")
        if self.client_auth and (self.cert is None or self.ca is None):
            raise ValueError("tls.client_auth needs tls.cert, tls.key and tls.ca")

    @property
    def enabled(self) -> bool:
        """Whether connections use TLS."""
        return self.cert is not None or self.ca is not None

    def names_of(self, role: CertificateRole) -> tuple[str, ...]:
        """Return the names that are accepted in certificates of a role."""
        return self.names.names_for_role(role) or (f"{role}{NAME_SUFFIX}", f"{SPIFFE_PREFIX}{role}")

    def check_caller(self, names: Iterable[str], roles: Iterable[CertificateRole]) -> None:
        """Raise PermissionDeniedError (WRONG_ROLE) unless a name belongs to one of the roles."""
        held = set(names)
        wanted = tuple(roles)
        if not any(held.intersection(self.names_of(role)) for role in wanted):
            raise PermissionDeniedError(
                f"this is for a certificate of the role {' or '.join(wanted)}", reason="WRONG_ROLE"
            )

    def for_fleet(self) -> TlsConfig:
        """Return this configuration. Raises InvalidRequestError if it has TLS but lacks a file that
        mutual TLS needs."""
        if self.enabled and (self.cert is None or self.ca is None):
            raise InvalidRequestError(
                "between processes TLS is mutual: tls.cert, tls.key and tls.ca are needed",
                reason="INVALID_CONFIG",
            )
        return self


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Contents of the files of a `TlsConfig` in PEM format; None for files that are not
    configured."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class TlsFiles:
    """The TLS files of one configuration. They are read again after they have changed."""

    def __init__(self, config: TlsConfig) -> None:
        """Read the files. Raises FailedPreconditionError (BAD_TLS) if they are missing or
        invalid."""
        self._config = config
        self._stamp = self._look()
        self._material = self._read()
        self._problem = ""

    def current_material(self) -> TlsMaterial:
        """Return the present contents of the files. If the files are now invalid, for example
        because only some were replaced so far, return their last valid contents."""
        try:
            stamp = self._look()
            if stamp != self._stamp:
                self._material = self._read()
                self._stamp, self._problem = stamp, ""
                logger.info("certificates were read again")
        except FailedPreconditionError as error:
            if error.message != self._problem:
                self._problem = error.message
                logger.warning("certificates are kept", extra={"reason": error.message})
        return self._material

    def _paths(self) -> tuple[Path | None, ...]:
        return (self._config.cert, self._config.key, self._config.ca)

    def _look(self) -> tuple[object, ...]:
        def stamp(path: Path | None) -> object:
            if path is None:
                return None
            try:
                found = path.stat()
            except OSError as error:
                raise _bad(path, error) from None
            return (found.st_ino, found.st_mtime_ns, found.st_size)

        return tuple(map(stamp, self._paths()))

    def _read(self) -> TlsMaterial:
        _check(self._config)
        cert, key, ca = map(_bytes_of, self._paths())
        return TlsMaterial(cert=cert, key=key, ca=ca)


def server_context(config: TlsConfig, *, require_client: bool) -> ssl.SSLContext:
    """Return a server context of Python's `ssl`. Raises FailedPreconditionError (BAD_TLS)."""
    _check(config)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.cert is not None:
        context.load_cert_chain(config.cert, config.key)
    if require_client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.ca)
    return context


def uvicorn_tls(config: TlsConfig) -> dict[str, Any]:
    """Return the TLS keyword arguments of `uvicorn.Config`, or an empty dict if no certificate is
    configured. Raises FailedPreconditionError (BAD_TLS)."""
    if config.cert is None:
        return {}
    _check(config)
    arguments: dict[str, Any] = {
        "ssl_certfile": str(config.cert),
        "ssl_keyfile": str(config.key),
    }
    if config.client_auth:
        arguments |= {"ssl_ca_certs": str(config.ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return arguments


def check_host(config: TlsConfig, host: str, advice: str) -> None:
    """Check that clients accept the certificate when they connect to `host`, a name or an IP
    address, and trust `config.ca`.

    Raises FailedPreconditionError: WRONG_HOST, with `advice` in its message, if the certificate is
    for other hosts, and BAD_TLS if another authority signed it or it is not valid now.
    """
    assert config.cert is not None
    server = server_context(config, require_client=False)
    client = ssl.create_default_context(cafile=config.ca)
    # Only a real handshake applies all rules of clients, such as wildcards and addresses.
    client.check_hostname = False
    names = ""
    try:
        names = ", ".join(name for _, name in _handshake(client, server, host))
        client.check_hostname = True
        _handshake(client, server, host)
    except ssl.SSLCertVerificationError as error:
        if not client.check_hostname:
            raise _bad(config.cert, error.verify_message) from None
        raise FailedPreconditionError(
            f"the certificate {config.cert} is not for {host!r}, but for {names}; {advice}",
            reason="WRONG_HOST",
        ) from None


def _handshake(
    client: ssl.SSLContext, server: ssl.SSLContext, host: str
) -> tuple[tuple[str, str], ...]:
    """Make a TLS handshake in memory and return the (kind, name) pairs of the server's certificate.
    Raises SSLCertVerificationError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(back, there, server_hostname=host)
    called = server.wrap_bio(there, back, server_side=True)
    for side in (caller, called, caller):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    found: dict[str, Any] = caller.getpeercert() or {}
    return tuple(found.get("subjectAltName", ()))


def _check(config: TlsConfig) -> None:
    """Load the files with OpenSSL, whose errors are clearer than gRPC's. Raises
    FailedPreconditionError (BAD_TLS)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if config.cert is not None and config.key is not None:
        for path in (config.cert, config.key):
            _bytes_of(path)
        try:
            # An encrypted key would otherwise ask for its passphrase on the terminal.
            context.load_cert_chain(config.cert, config.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            raise _bad(config.cert, f"with the key {config.key}: {error}") from None
    if config.ca is not None:
        _bytes_of(config.ca)
        try:
            context.load_verify_locations(config.ca)
        except (OSError, ValueError) as error:
            raise _bad(config.ca, error) from None


def _bytes_of(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _bad(path, error) from None
    if len(data) > MAX_FILE_BYTES:
        raise _bad(path, f"more than {MAX_FILE_BYTES} bytes")
    return data


def _bad(path: Path, problem: object) -> FailedPreconditionError:
    return FailedPreconditionError(f"TLS cannot be set up from {path}: {problem}", reason="BAD_TLS")
