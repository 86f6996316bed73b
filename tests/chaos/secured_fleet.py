"""A fleet with TLS and API keys, and what a stranger finds of it: its ports, logs and metrics."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.client.commands import keys as keys_command
from outrider.client.local.certificates import make_certificates, tls_from
from outrider.transport.tls import CertificateRole, TlsConfig
from tests.integration.stack import Process, Stack

ALICE, BOB, BOSS = "sk-outrider-alice-s3cret", "sk-outrider-bob-s3cret", "sk-outrider-boss-s3cret"
SECRETS = {"alice": ALICE, "bob": BOB, "boss": BOSS}


def write_keys(path: Path, **limits: dict[str, object]) -> Path:
    """A file with the keys of alice, bob and boss, and further limits of theirs."""
    tables = (keys_command.format_key_table(n, s, limits.get(n, {})) for n, s in SECRETS.items())
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


@dataclass
class LockedFleet:
    """A running stack whose ports are all behind certificates."""

    stack: Stack
    directory: Path

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.stack.router, self.stack.verifier, self.stack.drafter)

    @property
    def certificates(self) -> Path:
        return self.directory / "tls"

    @property
    def ca(self) -> bytes:
        return (self.certificates / "ca.pem").read_bytes()

    def tls(self, role: CertificateRole) -> TlsConfig:
        return tls_from(self.certificates, role)

    @property
    def grpc_ports(self) -> dict[str, str]:
        """HOST:PORT of all that speaks gRPC, by what it is."""
        router = self.stack.router
        return {
            "clients": router.address,
            "pool": str(router.ready["pool"]),
            "verifier": self.stack.verifier.address,
            "drafter": self.stack.drafter.address,
        }

    @property
    def http_ports(self) -> dict[str, str]:
        """HOST:PORT of all that speaks HTTP."""
        metrics = {f"{each.name} metrics": str(each.ready["metrics"]) for each in self.processes}
        return {"http": str(self.stack.router.ready["http"]), **metrics}

    def channel(
        self, address: str, role: CertificateRole | None, server: CertificateRole
    ) -> grpc.Channel:
        """A channel by the certificate of a role, to a server of a role."""
        key = cert = None
        if role is not None:
            tls = self.tls(role)
            assert tls.key is not None and tls.cert is not None
            key, cert = tls.key.read_bytes(), tls.cert.read_bytes()
        return secure_channel(address, self.ca, key, cert, server)

    def context(self, role: CertificateRole | None) -> ssl.SSLContext:
        """For HTTPS, with the certificate of a role; ports of other roles have no address."""
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
        context.check_hostname = False
        if role is not None:
            tls = self.tls(role)
            assert tls.cert is not None
            context.load_cert_chain(tls.cert, tls.key)
        return context

    def get(
        self, address: str, path: str, key: str = "", role: CertificateRole | None = None
    ) -> int:
        """Status of a GET over HTTPS."""
        return self.read(address, path, key, role)[0]

    def read(
        self, address: str, path: str, key: str = "", role: CertificateRole | None = None
    ) -> tuple[int, str]:
        """Status and body of a GET over HTTPS."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"https://{address}{path}", headers=headers)
        context = self.context(role)
        try:
            with urllib.request.urlopen(request, timeout=30.0, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, process: Process, name: str, **labels: str) -> float:
        """A sample of a process's metrics, as an operator reads them; 0 where there is none."""
        status, text = self.read(
            process.ready["metrics"], "/metrics", BOSS, CertificateRole.OPERATOR
        )
        assert status == 200
        told = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{told}}} " if told else f"{name} "
        found = [line for line in text.splitlines() if line.startswith(wanted)]
        return float(found[0].rsplit(" ", 1)[1]) if found else 0.0


def secure_channel(
    address: str, ca: bytes, key: bytes | None, cert: bytes | None, server: CertificateRole
) -> grpc.Channel:
    """A channel of its own to a server of a role."""
    options = [
        ("grpc.ssl_target_name_override", f"{server}.outrider.internal"),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", -1),
    ]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


def listening_ports(process: Process) -> set[int]:
    """TCP ports that a process listens on, as the kernel has them."""
    sockets: set[str] = set()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    ports: set[int] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def make_fleet(directory: Path, model: str, head: str) -> LockedFleet:
    """A fleet that has not been started: every port, no shared-memory channels, logs at DEBUG."""
    make_certificates(directory / "tls")
    keys = write_keys(
        directory / "keys.toml",
        bob={"max_tokens": 8, "max_concurrent": 1},
        boss={"operator": True},
    )
    common = ["--metrics-port", "0", "--log-level", "DEBUG"]
    stack = Stack(
        directory,
        model=model,
        head=head,
        router=[
            *common,
            *("--http", "127.0.0.1:0"),
            *("--pool-listen", "127.0.0.1:0"),
            *("--api-keys", str(keys)),
        ],
        verifier=[*common, "--no-shared-memory"],
        drafter=[*common, "--no-shared-memory"],
        tls=directory / "tls",
        api_key=ALICE,
    )
    return LockedFleet(stack, directory)
