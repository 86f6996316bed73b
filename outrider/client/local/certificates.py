"""`outrider certs`: makes a CA and a certificate for each role, for small fleets and tests.

Each certificate names its role (`outrider.transport.tls`); the router's certificate also names the
hosts at which clients reach the router. Anyone who has `ca-key.pem` can impersonate any role, so
keep the file away from the machines that serve.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.client.flags import integer_at_least
from outrider.errors import AlreadyExistsError
from outrider.extras import explain_missing_packages
from outrider.transport.tls import NAME_SUFFIX, CertificateRole, TlsConfig

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_DAYS = 365
CA = "ca"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `outrider certs` to a parser."""
    add = parser.add_argument
    add(
        "directory",
        metavar="DIR",
        type=Path,
        help="Directory for the certificates; created if it does not exist.",
    )
    add(
        "--host",
        metavar="NAME|IP",
        action="append",
        default=[],
        help="Name or address at which clients reach the router, besides localhost; may be "
        "repeated.",
    )
    add(
        "--days",
        type=integer_at_least(1),
        default=DEFAULT_DAYS,
        help=f"Days for which the certificates are valid (default: {DEFAULT_DAYS}).",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OutriderError."""
    make_certificates(args.directory, hosts=args.host, days=args.days)
    sys.stdout.write(f"{args.directory}: {', '.join((CA, *CertificateRole))}\n")
    return 0


def tls_from(directory: Path, role: CertificateRole) -> TlsConfig:
    """Return the TLS configuration of a role. `directory` contains the files that `outrider certs`
    created."""
    return TlsConfig(
        cert=directory / f"{role}.pem",
        key=directory / f"{role}-key.pem",
        ca=directory / f"{CA}.pem",
    )


def make_certificates(
    directory: Path, *, hosts: list[str] | None = None, days: int = DEFAULT_DAYS
) -> None:
    """Create a certificate authority and a certificate for each role, as PEM files in `directory`.

    `hosts` are names or addresses of the router, in addition to the local ones (localhost). `days`
    is the validity of the certificates. Raises NotFoundError if the package `cryptography` is
    missing. Raises AlreadyExistsError if the directory already contains an authority, because other
    machines may trust it.
    """
    with explain_missing_packages("outrider certs"):
        import cryptography  # noqa: F401
    if (directory / f"{CA}.pem").exists():
        raise AlreadyExistsError(
            f"{directory} already has a certificate authority; choose another directory",
            reason="CERTS_EXIST",
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _Authority(days)
    _write(directory, CA, authority.certificate, authority.key)
    for role in CertificateRole:
        names = [f"{role}{NAME_SUFFIX}"]
        if role is CertificateRole.ROUTER:
            names += [*LOCAL_NAMES, *(hosts or [])]
        _write(directory, role, *authority.issue(names))


class _Authority:
    def __init__(self, days: int) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name("outrider development authority")
        builder = self._builder(self._name, self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs_certificates=True), True)
        self.certificate = builder.sign(self.key, _digest())

    def issue(self, names: list[str]) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """Issue a certificate with these host names. Return the certificate and its private key."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = self._builder(_common_name(names[0]), key.public_key())
        for extension, critical in (
            (x509.SubjectAlternativeName(list(map(_general_name, names))), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage(both), False),
            (issuer, False),
        ):
            builder = builder.add_extension(extension, critical)
        return builder.sign(self.key, _digest()), key

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        from cryptography import x509

        # The certificates are valid from an hour ago, because clocks differ between machines.
        begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)
        )


def _digest() -> hashes.SHA256:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA256()


def _common_name(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> None:
    from cryptography.hazmat.primitives import serialization as formats

    pem = certificate.public_bytes(formats.Encoding.PEM)
    (directory / f"{name}.pem").write_bytes(pem)
    secret = key.private_bytes(
        formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption()
    )
    descriptor = os.open(
        directory / f"{name}-key.pem", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
