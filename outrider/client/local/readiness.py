"""Checks the hosts and ports of a local fleet, and waits until its router is healthy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from outrider.client.connection import is_serving
from outrider.client.local.certificates import tls_from
from outrider.client.local.child_process import ChildProcess, check_running
from outrider.client.local.config import split_address
from outrider.client.retry import RetryPolicy
from outrider.client.sync_client import Client
from outrider.errors import (
    FailedPreconditionError,
    OutriderError,
    UnauthenticatedError,
    UnavailableError,
)
from outrider.transport.tls import CertificateRole, RoleNames, TlsConfig, check_host
from outrider.wire.inference import ServerInfo

WILDCARD_HOSTS: Final = frozenset({"", "0.0.0.0", "::"})
"""Hosts that a server can listen on, but to which no client can connect."""
PROGRESS_DELAY_S: Final = 5.0
"""Time of waiting for a healthy fleet after which the reason is reported, in seconds."""
_LOOK_S: Final = 0.05


def check_hosts(directory: Path, addresses: Iterable[str]) -> None:
    """Check that the router's certificate in `directory` names the host of every HOST:PORT address.
    Wildcard hosts such as 0.0.0.0 are skipped.

    Raises FailedPreconditionError: WRONG_HOST for a host that the certificate does not name,
    BAD_TLS for files that cannot be used.
    """
    tls = tls_from(directory, CertificateRole.ROUTER)
    for address in addresses:
        host, _ = split_address(address)
        if host not in WILDCARD_HOSTS:
            check_host(tls, host, "`outrider certs DIR --host` puts names into certificates")


def check_ports_free(*addresses: str | None) -> None:
    """Check that the HOST:PORT `addresses` are free for one process each; None is skipped.

    A port on which another process listens counts as occupied, even if that process is a router.
    Routers can share a port, but a shared port would mix this fleet with another fleet of the same
    user. Raises FailedPreconditionError (ADDRESS_IN_USE).
    """
    taken: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for address in filter(None, addresses):
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                stack.enter_context(socket.create_server((host, int(port)), family=family))
            except OSError as error:
                why = f"{taken[port]} is asked for, too" if port in taken else str(error)
                raise FailedPreconditionError(
                    f"cannot listen on {address}: {why}", reason="ADDRESS_IN_USE"
                ) from error
            if port != "0":
                taken[port] = address


def wait_healthy(
    address: str,
    processes: Sequence[ChildProcess],
    *,
    tls_dir: Path | None,
    timeout_s: float,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Wait until the router at `address` reports that all its verifiers and drafters are healthy,
    or until `stop` is set. If this takes long, `progress` is called with the reason.

    Raises UnavailableError if one of `processes` ends or the wait takes longer than `timeout_s`
    seconds.
    """
    tls = None if tls_dir is None else _by_role(tls_dir)
    begin, said = time.monotonic(), ""
    with Client(address, retry=RetryPolicy(max_attempts=1), tls=tls) as client:
        while not stop.is_set() and (trouble := _trouble(client, address, tls)):
            check_running(processes)
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                words = "".join(process.log_tail() for process in processes)
                raise UnavailableError(
                    f"the processes did not connect to each other within {timeout_s:g} s: "
                    f"{trouble}{words}",
                    reason="NOT_HEALTHY",
                )
            if waited_s > PROGRESS_DELAY_S and trouble != said:
                progress(f"waiting: {trouble}")
                said = trouble
            stop.wait(_LOOK_S)


def _by_role(directory: Path) -> TlsConfig:
    # Check the role in the certificate instead of the host: no certificate names 0.0.0.0.
    config = TlsConfig(ca=tls_from(directory, CertificateRole.ROUTER).ca)
    return TlsConfig(ca=config.ca, names=RoleNames(router=config.names_of(CertificateRole.ROUTER)))


def _trouble(client: Client, address: str, tls: TlsConfig | None) -> str:
    """Return why the router cannot serve requests yet; "" if it can."""
    try:
        info: ServerInfo = client.server_info()
    except UnauthenticatedError:
        # Without an API key, only the health service can be asked.
        return "" if is_serving(address, tls) else "the router serves nobody yet"
    except OutriderError as error:
        return f"the router at {address} does not answer: {error.message}"
    away = [f"the verifier at {v.address}" for v in info.verifiers if not v.healthy]
    away += [f"the drafter at {d.address}" for d in info.drafters if not d.healthy]
    return f"{' and '.join(away)} is not healthy" if away else ""
