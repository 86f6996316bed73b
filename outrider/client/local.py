"""Router, verifier and drafter on this machine, as three processes started by argv.

Nothing of the processes is imported: what is known of them are their flags and the line that they
print when they serve.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.client.processes import ChildProcess
from outrider.client.retry import RetryPolicy
from outrider.client.sync import Client
from outrider.errors import InvalidRequestError, OutriderError, UnavailableError
from outrider.spec.plan import DraftMethod
from outrider.wire.inference import ServerInfo

START_S = 180.0
"""Longest wait for a process to load its model and serve."""
HEAD_METHODS = frozenset({DraftMethod.EAGLE3, DraftMethod.EAGLE})


def say(line: str) -> None:
    """A progress line on stderr."""
    sys.stderr.write(f"[outrider] {line}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What to run."""

    model: Path
    """Directory of the target."""
    model_name: str = ""
    """Name that clients ask for; "" takes the directory's."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Draft sources; none at all starts no drafter."""
    head: Path | None = None
    """Directory of the EAGLE head; needed by eagle3 and eagle."""
    draft_model: Path | None = None
    """Directory of the small model; needed by model."""
    dtype: str = "float32"
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the router; port 0 takes a free one."""
    kv_tokens: int | None = None
    """KV budget of the verifier; None takes its default."""
    max_sessions: int | None = None
    queue_limit: int | None = None
    threads: int | None = None
    """Threads of verifier and drafter each; None takes torch's choice."""
    metrics_port: int | None = None
    """Prometheus port of the router; None serves none."""
    log_dir: Path | None = None
    """Where the processes' logs go; None takes a folder that is removed at the end."""
    inherit_logs: bool = False
    """Let the processes log to our stderr instead."""

    def __post_init__(self) -> None:
        if HEAD_METHODS & set(self.methods) and self.head is None:
            raise InvalidRequestError(
                "drafting with a head needs one: no head ships for this model, give --head DIR",
                reason="NO_HEAD",
            )
        if DraftMethod.MODEL in self.methods and self.draft_model is None:
            raise InvalidRequestError(
                "drafting with a small model needs --draft-model", reason="NO_DRAFT_MODEL"
            )


class LocalCluster:
    """The running processes; a context manager that stops them."""

    def __init__(self, config: LocalConfig, *, progress: Callable[[str], None] = say) -> None:
        self._config = config
        self._progress = progress
        self._own_logs: Path | None = None
        self.verifier: ChildProcess | None = None
        self.drafter: ChildProcess | None = None
        self.router: ChildProcess | None = None

    @property
    def address(self) -> str:
        """Address of the router's API."""
        assert self.router is not None, "the cluster is not started"
        return self.router.address

    @property
    def processes(self) -> tuple[ChildProcess, ...]:
        """Those that were started."""
        every = (self.router, self.drafter, self.verifier)
        return tuple(process for process in every if process is not None)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> str:
        """Start everything and wait until requests can be served; the router's address.

        Raises UnavailableError with the end of its log if a process does not come up.
        """
        try:
            return self._start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop everything; idempotent."""
        for process in self.processes:
            process.close()
        if self._own_logs is not None:
            shutil.rmtree(self._own_logs, ignore_errors=True)
            self._own_logs = None

    def _start(self) -> str:
        config, logs = self._config, self._log_dir()
        name = config.model_name or config.model.name
        self._progress(f"starting the verifier: {name}, {config.dtype}")
        self.verifier = ChildProcess(
            "verifier", "outrider_verifier", verifier_args(config), log_dir=logs
        )
        self.verifier.start()
        if config.methods:
            methods = ", ".join(config.methods)
            self._progress(f"starting the drafter: {methods}")
            self.drafter = ChildProcess(
                "drafter", "outrider_drafter", drafter_args(config), log_dir=logs
            )
            self.drafter.start()
        verifier = self.verifier.wait_ready(START_S)
        drafter = None if self.drafter is None else self.drafter.wait_ready(START_S)
        self._progress("starting the router")
        self.router = ChildProcess(
            "router",
            "outrider_router",
            router_args(config, verifier, drafter),
            listen=config.listen,
            log_dir=logs,
        )
        self.router.start()
        address = self.router.wait_ready(START_S)
        self._wait_healthy(address)
        self._progress(f"ready on {address}")
        return address

    def _log_dir(self) -> Path | None:
        if self._config.inherit_logs:
            return None
        if self._config.log_dir is not None:
            self._config.log_dir.mkdir(parents=True, exist_ok=True)
            return self._config.log_dir
        self._own_logs = Path(tempfile.mkdtemp(prefix="outrider-"))
        return self._own_logs

    def _wait_healthy(self, address: str) -> None:
        end = time.monotonic() + START_S
        with Client(address, retry=RetryPolicy(max_attempts=1)) as client:
            while not _healthy(client):
                for process in self.processes:
                    if process.exit_status is not None:
                        raise process.died()
                if time.monotonic() > end:
                    words = "".join(process.last_words() for process in self.processes)
                    raise UnavailableError(
                        f"the processes did not find each other in {START_S:g} s{words}",
                        reason="NOT_HEALTHY",
                    )
                time.sleep(0.05)


def _healthy(client: Client) -> bool:
    try:
        info: ServerInfo = client.server_info()
    except OutriderError:
        return False
    return all(v.healthy for v in info.verifiers) and all(d.healthy for d in info.drafters)


def _flags(**values: object) -> list[str]:
    """--name value for everything that is set."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def verifier_args(config: LocalConfig) -> list[str]:
    """Flags of the verifier."""
    uses_head = bool(HEAD_METHODS & set(config.methods))
    return _flags(
        model=config.model,
        features_from=config.head if uses_head else None,
        dtype=config.dtype,
        kv_tokens=config.kv_tokens,
        max_sessions=config.max_sessions,
        threads=config.threads,
        verifier_id="verifier-0",
    )


def drafter_args(config: LocalConfig) -> list[str]:
    """Flags of the drafter."""
    uses_head = bool(HEAD_METHODS & set(config.methods))
    return _flags(
        model=config.model,
        head=config.head if uses_head else None,
        methods=",".join(config.methods),
        draft_model=config.draft_model if DraftMethod.MODEL in config.methods else None,
        dtype=config.dtype,
        threads=config.threads,
        drafter_id="drafter-0",
    )


def router_args(config: LocalConfig, verifier: str, drafter: str | None) -> list[str]:
    """Flags of the router."""
    return _flags(
        model=config.model,
        model_name=config.model_name or None,
        verifier=verifier,
        drafter=drafter,
        queue_limit=config.queue_limit,
        metrics_port=config.metrics_port,
    )
