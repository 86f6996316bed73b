"""Authorities and certificates for tests; keys are written once a run, into a test's folder."""

from __future__ import annotations

from pathlib import Path

import trustme

from outrider.transport.tls import CertificateRole, TlsConfig


class Authority:
    """An authority whose certificates lie in a folder."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.ca = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *names: str, client_auth: bool = False) -> TlsConfig:
        """A certificate with these names (of a role's kind unless told), as a process has it."""
        issued = self._ca.issue_cert(*(names or (f"{name}.outrider.internal",)))
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}-key.pem"
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return TlsConfig(cert=cert, key=key, ca=self.ca, client_auth=client_auth)

    def role(self, role: CertificateRole) -> TlsConfig:
        """A certificate of a role that is good for loopback addresses, too."""
        return self.issue(role, f"{role}.outrider.internal", "127.0.0.1", "localhost")
