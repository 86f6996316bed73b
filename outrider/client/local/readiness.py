"""Readiness of a local fleet: checks of hosts and ports, and the wait for a healthy router."""

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
"""Hosts to listen on that are no host to dial."""
PROGRESS_INTERVAL_S: Final = 5.0
"""Silence of a fleet before it is said what it waits for."""
_LOOK_S: Final = 0.05


def check_hosts(directory: Path, addresses: Iterable[str]) -> None:
    """FailedPreconditionError unless the router's certificate in this folder is for all HOST:PORT,
    or no good at all: WRONG_HOST, BAD_TLS."""
    tls = tls_from(directory, CertificateRole.ROUTER)
    for address in addresses:
        host, _ = split_address(address)
        if host not in WILDCARD_HOSTS:
            check_host(tls, host, "`outrider certs DIR --host` puts names into certificates")


def check_ports_free(*addresses: str | None) -> None:
    """FailedPreconditionError (ADDRESS_IN_USE) where nobody can listen at all of these HOST:PORT
    at once; None is left out.

    Somebody else may: routers that share their ports would share them with other fleets of the
    same user, too.
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
    """Wait until the router at `address` says that all it knows serve, or until `stop` is set.

    Raises UnavailableError when a process ends, or it takes too long.
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
                    f"the processes did not find each other in {timeout_s:g} s: {trouble}{words}",
                    reason="NOT_HEALTHY",
                )
            if waited_s > PROGRESS_INTERVAL_S and trouble != said:
                progress(f"waiting: {trouble}")
                said = trouble
            stop.wait(_LOOK_S)


def _by_role(directory: Path) -> TlsConfig:
    # Its role is in every router's certificate; 0.0.0.0 is in none.
    config = TlsConfig(ca=tls_from(directory, CertificateRole.ROUTER).ca)
    return TlsConfig(ca=config.ca, names=RoleNames(router=config.names_of(CertificateRole.ROUTER)))


def _trouble(client: Client, address: str, tls: TlsConfig | None) -> str:
    """What keeps requests from being served; "" when nothing does."""
    try:
        info: ServerInfo = client.server_info()
    except UnauthenticatedError:
        # Without a key of our own we hear no more than whether a verifier was found.
        return "" if is_serving(address, tls) else "the router serves nobody yet"
    except OutriderError as error:
        return f"the router at {address} does not answer: {error.message}"
    away = [f"the verifier at {v.address}" for v in info.verifiers if not v.healthy]
    away += [f"the drafter at {d.address}" for d in info.drafters if not d.healthy]
    return f"{' and '.join(away)} is not healthy" if away else ""
