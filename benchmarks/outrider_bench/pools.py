"""Pools of verifiers and drafters behind one router, as a benchmark starts them: every process can
be killed and put back, and each computes on a GPU of its own where there are as many."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from outrider.client import Client, OutriderError, RetryPolicy
from outrider.client.local import (
    CPU,
    SHARED_MEMORY_FRACTION,
    LocalConfig,
    count_gpus,
    drafter_args,
    router_args,
    verifier_args,
)
from outrider.client.processes import ChildProcess
from outrider.errors import UnavailableError
from outrider.wire.inference import ServerInfo

START_S: Final = 600.0
"""Longest wait for a process to serve, to end, or to be seen by the router."""
VERIFIER: Final = "verifier"
DRAFTER: Final = "drafter"
ROUTER: Final = "router"


class Pool:
    """So many verifiers and drafters of one configuration, and their router."""

    def __init__(
        self, config: LocalConfig, directory: Path, *, verifiers: int, drafters: int
    ) -> None:
        """Starts nothing yet. Logs and the router's journal go to `directory`."""
        gpus = count_gpus() if config.device != CPU else 0
        drafters = drafters if config.drafter_methods else 0
        places = gpu_places(verifiers, drafters, gpus)
        self._config, self._directory = config, directory
        self.kinds: dict[str, list[ChildProcess]] = {
            VERIFIER: self._numbered(VERIFIER, verifier_args(config, gpus), places[:verifiers]),
            DRAFTER: [],
        }
        if drafters:
            own = places[verifiers:]
            self.kinds[DRAFTER] = self._numbered(DRAFTER, drafter_args(config, gpus), own)

    def _numbered(self, kind: str, args: list[str], places: list[list[str]]) -> list[ChildProcess]:
        return [
            self._child(
                f"{kind}-{i}", f"outrider_{kind}", [*args, *place, f"--{kind}-id={kind}-{i}"]
            )
            for i, place in enumerate(places)
        ]

    def _child(self, name: str, module: str, args: Sequence[str]) -> ChildProcess:
        return ChildProcess(name, module, args, log_dir=self._directory)

    @contextmanager
    def running(self) -> Iterator[Pool]:
        """Start everything, router last; stop it at the end. Raises UnavailableError."""
        with ExitStack() as stack:
            peers = [process for kind in self.kinds.values() for process in kind]
            for process in peers:
                stack.callback(process.close)
                process.start()
            addresses = {process.name: process.wait_ready(START_S) for process in peers}
            args = router_args(self._config, addresses.pop(f"{VERIFIER}-0"), None)
            for name, address in addresses.items():
                args += [f"--{name.split('-')[0]}", address]
            args += ["--journal", str(self._directory / "journal")]
            router = self._child(ROUTER, "outrider_router", args)
            self.kinds[ROUTER] = [router]
            stack.callback(router.close)
            router.start()
            router.wait_ready(START_S)
            self.wait_idle()
            yield self

    @property
    def address(self) -> str:
        """The router's."""
        return self.kinds[ROUTER][0].address

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
            len(info.verifiers) == len(self.kinds[VERIFIER])
            and len(info.drafters) == len(self.kinds[DRAFTER])
            and all(verifier.healthy and not verifier.draining for verifier in info.verifiers)
            and all(drafter.healthy for drafter in info.drafters)
            and links == len(info.verifiers) * len(info.drafters)
        )


def _asked(client: Client, holds: Callable[[ServerInfo], bool]) -> bool:
    try:
        return holds(client.server_info())
    except OutriderError:
        return False


def gpu_places(verifiers: int, drafters: int, gpus: int) -> list[list[str]]:
    """Flags that place each process, verifiers first; none without GPUs.

    GPUs are given out in turn; verifiers that share one share its memory.
    """
    if not gpus:
        return [[] for _ in range(verifiers + drafters)]
    flags = [["--device", f"cuda:{i % gpus}"] for i in range(verifiers + drafters)]
    shared = -(-verifiers // gpus)
    if shared > 1 or verifiers + drafters > gpus:
        for place in flags[:verifiers]:
            place += ["--memory-fraction", f"{SHARED_MEMORY_FRACTION / shared:.3f}"]
    return flags
