"""Router, verifier and drafter on this machine, as three processes started by argv.

Nothing of the processes is imported: what is known of them are their flags and the line that they
print when they serve.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.client.certs_command import tls_from
from outrider.client.healthy import check_hosts, wait_healthy
from outrider.client.processes import ChildProcess
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import Role

START_S = 600.0
"""Longest wait for a process to load its model and serve."""
CPU, CUDA = DEVICES = ("cpu", "cuda")
SEPARATE, COLOCATED, FUSED = PLACEMENTS = ("separate", "colocated", "fused")
SHARED_MEMORY_FRACTION = 0.7
"""Share of a GPU's memory that the verifier takes where the drafter computes on the same one."""
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
    dtype: str = ""
    """Element type of the models; "" takes float32 on a CPU, bfloat16 on a GPU."""
    device: str = "cpu"
    """cpu or cuda: where target and draft models compute."""
    drafter_device: str = ""
    """torch device of the drafter; "" takes a GPU of its own where there are two."""
    placement: str = SEPARATE
    """Where the head drafts: separate (in the drafter), colocated or fused (in the verifier)."""
    draft_length: int | None = None
    """Draft tokens a round of a head in the verifier; None takes its default."""
    draft_topk: int | None = None
    """Children that a head in the verifier tries of a node; None takes its default."""
    planner: str | None = None
    """automatic, where the verifier decides whether and how far sessions speculate, or fixed, where
    it does what they ask for; None takes its default, automatic."""
    look_ahead: int | None = None
    """Of requests that leave it open: 0 drafts in lock-step, 1 is the planner's choice; None takes
    the router's default."""
    fan_out: int | None = None
    """Outcomes drafted ahead a round, of requests that leave them open; None as above."""
    cuda_graphs: bool = True
    simulated_acceptance: str = ""
    """Benchmarks with random weights only: see the verifier's option of this name."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the router; port 0 takes a free one."""
    http: str | None = None
    """HOST:PORT of the router's HTTP API; port 0 takes a free one, None serves none."""
    kv_tokens: int | None = None
    """KV budget of the verifier; None takes its default, which on a GPU is what there is."""
    max_sessions: int | None = None
    queue_limit: int | None = None
    journal: Path | None = None
    """Log by which resumable requests survive a restart of the router; None keeps none."""
    slow_reader_s: float | None = None
    """Time after which the router gives up a client that does not read; None takes its default."""
    threads: int | None = None
    """Threads of verifier and drafter each; None takes torch's choice."""
    awake_cores: int | None = None
    """Cores that verifier and drafter each keep from going idle while they serve; GPUs only."""
    exchange_delay_ms: float = 0.0
    """Benchmarks only: see the drafter's option bench_exchange_delay_ms."""
    drafter_slowdown: float = 1.0
    """Benchmarks only: see the drafter's option bench_slowdown."""
    round_ms: float = 0.0
    row_us: float = 0.0
    """Benchmarks only: see the verifier's options bench_round_ms and bench_row_us."""
    trace_dir: Path | None = None
    """Where verifier and drafter leave their timelines when they end; None: they keep none."""
    metrics_port: int | None = None
    """Prometheus port of the router; None serves none."""
    metrics_compat: str | None = None
    """See the router's option of this name."""
    tls_dir: Path | None = None
    """Certificates that `outrider certs` made; None: all connections are plain text."""
    api_keys: Path | None = None
    """File of the API keys that clients must have; None asks for none."""
    log_dir: Path | None = None
    """Where the processes' logs go; None takes a folder that is removed at the end."""
    inherit_logs: bool = False
    """Let the processes log to our stderr instead."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise InvalidRequestError(
                f"device must be cpu or cuda, got {self.device!r}", reason="INVALID_DEVICE"
            )
        if self.placement not in PLACEMENTS:
            raise InvalidRequestError(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}",
                reason="INVALID_PLACEMENT",
            )
        if self.placement != SEPARATE and DraftMethod.EAGLE3 not in self.methods:
            raise InvalidRequestError(
                f"{self.placement} drafting is for the method eagle3", reason="INVALID_PLACEMENT"
            )
        if HEAD_METHODS & set(self.methods) and self.head is None:
            raise InvalidRequestError(
                "drafting with a head needs one: no head ships for this model, give --head DIR",
                reason="NO_HEAD",
            )
        if DraftMethod.MODEL in self.methods and self.draft_model is None:
            raise InvalidRequestError(
                "drafting with a small model needs --draft-model", reason="NO_DRAFT_MODEL"
            )

    @property
    def element_type(self) -> str:
        """Element type of the models."""
        return self.dtype or ("float32" if self.device == CPU else "bfloat16")

    @property
    def drafter_methods(self) -> tuple[DraftMethod, ...]:
        """What the drafter process offers; none at all: there is no such process."""
        if self.placement == SEPARATE:
            return self.methods
        return tuple(method for method in self.methods if method not in HEAD_METHODS)


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

        Raises UnavailableError with the end of its log if a process does not come up, and
        FailedPreconditionError (WRONG_HOST) where no client would believe the certificate.
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
        if config.tls_dir is not None:
            check_hosts(config.tls_dir, filter(None, (config.listen, config.http)))
        gpus = count_gpus() if config.device != CPU else 0
        where = "" if config.placement == SEPARATE else f", {config.placement} drafting"
        self._progress(
            f"starting the verifier: {name}, {config.element_type} on {config.device}{where}"
        )
        if config.simulated_acceptance:
            self._progress(f"SIMULATED ACCEPTANCE {config.simulated_acceptance}: no real text")
        self.verifier = ChildProcess(
            "verifier", "outrider_verifier", verifier_args(config, gpus), log_dir=logs
        )
        self.verifier.start()
        if config.drafter_methods:
            methods = ", ".join(config.drafter_methods)
            self._progress(f"starting the drafter: {methods}")
            self.drafter = ChildProcess(
                "drafter", "outrider_drafter", drafter_args(config, gpus), log_dir=logs
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
        wait_healthy(
            address,
            self.processes,
            tls_dir=config.tls_dir,
            timeout_s=START_S,
            progress=self._progress,
        )
        self._progress(f"ready on {address}")
        if "http" in self.router.ready:
            self._progress(f"OpenAI's API on http://{self.router.ready['http']}/v1")
        return address

    def _log_dir(self) -> Path | None:
        if self._config.inherit_logs:
            return None
        if self._config.log_dir is not None:
            self._config.log_dir.mkdir(parents=True, exist_ok=True)
            return self._config.log_dir
        self._own_logs = Path(tempfile.mkdtemp(prefix="outrider-"))
        return self._own_logs


def _tls_flags(config: LocalConfig, role: Role) -> dict[str, object]:
    if config.tls_dir is None:
        return {}
    tls = tls_from(config.tls_dir, role)
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}


def _flags(**values: object) -> list[str]:
    """--name value for everything that is set."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags


def count_gpus() -> int:
    """CUDA devices that processes started here will see; at least 1. Imports no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return max(1, len([name for name in visible.split(",") if name.strip()]))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return max(1, sum(line.startswith("GPU ") for line in listed.stdout.splitlines()))


def devices(config: LocalConfig, gpus: int) -> tuple[str, str]:
    """torch devices of verifier and drafter on a machine with so many GPUs."""
    own = config.drafter_device
    if config.device == CPU:
        return CPU, own or CPU
    return "cuda:0", own or ("cuda:1" if gpus > 1 else "cuda:0")


def verifier_args(config: LocalConfig, gpus: int = 0) -> list[str]:
    """Flags of the verifier."""
    uses_head = bool(HEAD_METHODS & set(config.methods))
    device, drafter_device = devices(config, gpus)
    shares = device != CPU and device == drafter_device and bool(config.drafter_methods)
    flags = _flags(
        model=config.model,
        features_from=config.head if uses_head else None,
        dtype=config.element_type,
        device=device,
        placement=config.placement,
        draft_length=config.draft_length,
        draft_topk=config.draft_topk if config.placement != SEPARATE else None,
        planner=config.planner,
        simulated_acceptance=config.simulated_acceptance or None,
        kv_tokens=config.kv_tokens,
        memory_fraction=SHARED_MEMORY_FRACTION if shares else None,
        max_sessions=config.max_sessions,
        threads=config.threads,
        awake_cores=config.awake_cores,
        bench_round_ms=config.round_ms or None,
        bench_row_us=config.row_us or None,
        trace_file=None if config.trace_dir is None else config.trace_dir / "verifier.json",
        verifier_id="verifier-0",
        **_tls_flags(config, Role.VERIFIER),
    )
    return flags if config.cuda_graphs else [*flags, "--no-cuda-graphs"]


def drafter_args(config: LocalConfig, gpus: int = 0) -> list[str]:
    """Flags of the drafter."""
    methods = config.drafter_methods
    flags = _flags(
        model=config.model,
        head=config.head if HEAD_METHODS & set(methods) else None,
        methods=",".join(methods),
        draft_model=config.draft_model if DraftMethod.MODEL in methods else None,
        dtype=config.element_type,
        device=devices(config, gpus)[1],
        threads=config.threads,
        awake_cores=config.awake_cores,
        bench_exchange_delay_ms=config.exchange_delay_ms or None,
        bench_slowdown=config.drafter_slowdown if config.drafter_slowdown != 1.0 else None,
        trace_file=None if config.trace_dir is None else config.trace_dir / "drafter.json",
        drafter_id="drafter-0",
        **_tls_flags(config, Role.DRAFTER),
    )
    return flags if config.cuda_graphs else [*flags, "--no-cuda-graphs"]


def router_args(config: LocalConfig, verifier: str, drafter: str | None) -> list[str]:
    """Flags of the router."""
    return _flags(
        model=config.model,
        model_name=config.model_name or None,
        verifier=verifier,
        drafter=drafter,
        http=config.http,
        look_ahead=config.look_ahead,
        fan_out=config.fan_out,
        queue_limit=config.queue_limit,
        journal=config.journal,
        slow_reader_s=config.slow_reader_s,
        metrics_port=config.metrics_port,
        metrics_compat=config.metrics_compat,
        api_keys=config.api_keys,
        **_tls_flags(config, Role.ROUTER),
    )
