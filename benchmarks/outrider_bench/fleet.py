"""Two verifiers, two drafters and a router, of which every one can be killed and put back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from outrider.client import Client, OutriderError, RetryPolicy
from outrider.client.local import (
    LocalConfig,
    count_gpus,
    drafter_args,
    router_args,
    verifier_args,
)
from outrider.client.processes import ChildProcess
from outrider.errors import UnavailableError
from outrider.wire.inference import ServerInfo

START_S = 600.0
"""Longest wait for a process to serve, to end, or to be seen by the router."""


class Fleet:
    """The processes by kind: verifier, drafter, router."""

    def __init__(self, config: LocalConfig, directory: Path) -> None:
        """`directory` is for logs and the router's journal."""
        gpus = count_gpus() if config.device != "cpu" else 0
        self._config, self._directory = config, directory

        def numbered(kind: str, args: list[str]) -> list[ChildProcess]:
            return [
                self._child(
                    f"{kind}-{i}", f"outrider_{kind}", [*args, f"--{kind}-id", f"{kind}-{i}"]
                )
                for i in range(2)
            ]

        self.kinds = {"verifier": numbered("verifier", verifier_args(config, gpus))}
        methods = config.drafter_methods
        self.kinds["drafter"] = numbered("drafter", drafter_args(config, gpus)) if methods else []

    def _child(self, name: str, module: str, args: list[str]) -> ChildProcess:
        return ChildProcess(name, module, args, log_dir=self._directory)

    @contextmanager
    def running(self) -> Iterator[Fleet]:
        """Start everything, router last; stop it at the end."""
        with ExitStack() as stack:
            peers = [process for kind in self.kinds.values() for process in kind]
            for process in peers:
                stack.callback(process.close)
                process.start()
            addresses = {process.name: process.wait_ready(START_S) for process in peers}
            drafters = [process.name for process in self.kinds["drafter"]]
            args = router_args(self._config, addresses["verifier-0"], None)
            for name in ("verifier-1", *drafters):
                args += [f"--{name.split('-')[0]}", addresses[name]]
            args += ["--journal", str(self._directory / "journal")]
            router = self._child("router", "outrider_router", args)
            self.kinds["router"] = [router]
            stack.callback(router.close)
            router.start()
            router.wait_ready(START_S)
            self.wait_idle()
            yield self

    @property
    def address(self) -> str:
        """The router's."""
        return self.kinds["router"][0].address

    def repair(self, process: ChildProcess) -> None:
        """Put back what a fault took."""
        if process.pid is not None and process.exit_status is None:
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)
        if process.exit_status is not None:
            process.start()
            process.wait_ready(START_S)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until the router sees everybody, and nothing runs; UnavailableError if never."""
        self._wait(lambda info: self._serves(info) and not any(v.sessions for v in info.verifiers))

    def wait_serving(self) -> None:
        """Wait until the router sees everybody, whatever runs; UnavailableError if never."""
        self._wait(self._serves)

    def _wait(self, holds: Callable[[ServerInfo], bool]) -> None:
        end = time.monotonic() + START_S
        with Client(self.address, timeout_s=5.0, retry=RetryPolicy(max_attempts=1)) as client:
            while not _asked(client, holds):
                if time.monotonic() > end:
                    raise UnavailableError("the fleet is not healthy", reason="NOT_HEALTHY")
                time.sleep(0.05)

    def _serves(self, info: ServerInfo) -> bool:
        links = sum(len(drafter.links) for drafter in info.drafters)
        return (
            len(info.verifiers) == len(self.kinds["verifier"])
            and len(info.drafters) == len(self.kinds["drafter"])
            and all(verifier.healthy and not verifier.draining for verifier in info.verifiers)
            and all(drafter.healthy for drafter in info.drafters)
            and links == len(info.verifiers) * len(info.drafters)
        )


def _asked(client: Client, holds: Callable[[ServerInfo], bool]) -> bool:
    try:
        return holds(client.server_info())
    except OutriderError:
        return False
