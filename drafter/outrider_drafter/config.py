"""Configuration of the drafter process: the fields of `DrafterConfig` are its TOML keys."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from typing import Annotated

from outrider.busy_polling import check_request
from outrider.config import OneOf
from outrider.config.hooks import check_hooks
from outrider.grammar.limits import CompileLimits, MaskLimits
from outrider.logs import LOG_LEVELS, check_level
from outrider.spans import TracingConfig
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, may_exchange
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import TlsConfig

DTYPES = ("float32", "bfloat16", "float16")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectConfig:
    """Reconnection to a lost verifier."""

    min_backoff_s: float = 0.1
    """Pause before the first attempt to reconnect; it doubles with each further attempt, with
    jitter."""
    max_backoff_s: float = 5.0
    """Maximum pause between attempts."""
    handshake_timeout_s: float = 5.0
    """Maximum time that the drafter waits for the verifier's answer to `Hello`."""
    attach_wait_s: float = 1.0
    """Maximum time that the RPC `Attach` waits for the result of the first attempt; attempts
    continue afterwards."""

    def __post_init__(self) -> None:
        _require(
            0.0 < self.min_backoff_s <= self.max_backoff_s,
            "0 < min_backoff_s <= max_backoff_s must hold",
        )
        _require(self.handshake_timeout_s > 0.0, "handshake_timeout_s must be positive")
        _require(self.attach_wait_s >= 0.0, "attach_wait_s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """N-gram drafts (prompt lookup)."""

    max_match: int = 4
    """Maximum number of tokens of the suffix that is looked up."""
    min_match: int = 2
    """Minimum number of tokens of a matching suffix."""

    def __post_init__(self) -> None:
        _require(1 <= self.min_match <= self.max_match, "1 <= min_match <= max_match must hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Configuration of a drafter; the fields are the keys of its TOML file."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT of the control service; port 0 picks a free port."""
    model: str = ""
    """Target model, a directory or the name of a pulled model; the drafter reads its vocabulary,
    tokenizer hash and embedding."""
    head: str = ""
    """Directory of an EAGLE head; needed by the methods eagle3 and eagle."""
    draft_model: str = ""
    """Small draft model (directory or name of a pulled model) with the target's tokenizer; needed
    by the method model."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Draft methods that this drafter offers."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Element type of the draft models: float32, bfloat16 or float16."""
    device: str = "cpu"
    """torch device of the draft models."""
    cuda_graphs: bool = True
    """Whether drafts of an EAGLE head or a small model run as captured CUDA graphs on a CUDA
    device. Otherwise kernels are launched one by one."""
    threads: int = 0
    """Number of torch's compute threads; 0 measures the fastest number if the device is a CPU."""
    busy_polling_cores: int = 0
    """CPU cores kept busy-polling while sessions are served, to reduce wake-up latency; with an
    accelerator only. A drafter with verifiers over gRPC uses 3."""
    shared_memory: bool = True
    """Whether exchanges with verifiers on this host use shared memory (Linux). With other hosts,
    and if this is off, they use gRPC."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether to exchange directly between GPUs with verifiers on this host that allow it: on, off
    or auto, which is on if this process computes on a GPU. For eagle3 heads only."""
    exchange_kv_rows: int = 1 << 22
    """Maximum number of KV rows of the EAGLE head for all verifiers of device_exchange together. A
    verifier needs one row for each of its KV tokens. A verifier for which too few rows are left is
    refused and exchanges by messages."""
    drafter_id: str = field(default_factory=lambda: f"drafter-{secrets.token_hex(4)}")
    """Unique id of this drafter. Set it, so that the drafter is recognised after a restart."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 picks a free port, -1 disables the endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint listens on."""
    health_listen: str = ""
    """HOST:PORT of an additional port that serves only grpc.health.v1.Health, in plain text, for a
    supervisor on this machine. Port 0 picks a free port, "" disables it."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of requests, for OpenTelemetry."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Lowest log level that is written to stderr."""
    drain_timeout_s: float = 10.0
    """Maximum time that routers get after SIGTERM to move this drafter's sessions."""
    stall_s: float = 10.0
    """Maximum time in seconds without a drafting step while drafts are requested. After this time
    the drafting thread counts as hung: health reports NOT_SERVING, the connections to verifiers are
    closed, and the process exits with status 3 so that its supervisor restarts it. Loading,
    compilation and graph capture do not count. 0 disables the check."""
    max_sessions: int = 1024
    """Maximum number of followed sessions, which is reported to routers. Beyond it, the least
    recently used session of the verifier with the most sessions is dropped."""
    limit_look_ahead_time: bool = True
    """Whether look-ahead passes are limited to the time until the next verdict; otherwise each pass
    runs to its end."""
    max_context: int = 131072
    """Maximum length of a followed session in tokens."""
    head_kv_rows: int = 131072
    """Maximum number of draft KV rows of all sessions of a head together."""
    head_max_context: int = 0
    """Maximum context of a head in draft positions; 0 uses the head's own limit."""
    draft_model_kv_tokens: int = 0
    """Maximum number of KV tokens that all sessions of the small model may reserve together. 0
    chooses the number automatically: on a GPU 131072, or fewer if half of the free GPU memory holds
    fewer; elsewhere 16384. On a GPU, sessions that are drafted from the host have up to 16384
    tokens in addition."""
    max_backlog: int = 4096
    """Maximum number of messages of one verifier that wait for the drafting thread; beyond it,
    reading from that verifier pauses."""
    max_unsent_batches: int = 1024
    """Maximum number of draft batches that wait for a slow connection; beyond it the oldest batches
    are dropped."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """Certificate of this process, for the ports that it serves and the connections that it
    makes."""
    trace_file: str = ""
    """File to which the process writes a timeline of its last events when it exits; "" writes
    none."""
    hooks: tuple[str, ...] = ()
    """The operator's own modules that run in this process, each "MODULE" or
    "MODULE:KEY=VALUE,KEY=VALUE". They are imported before the process is built. Each has a function
    `install(hooks, *, key=...)` that receives the hook points of the process
    (`outrider_drafter.hooks`) and the options. An environment variable lists hooks with several
    options in TOML syntax."""
    ngram: NgramConfig = NgramConfig()
    """N-gram drafts (prompt lookup)."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits of compiling the grammar of a structured output."""
    grammar_masks: MaskLimits = field(default_factory=MaskLimits)
    """Limits of computing the masks of a session with a structured output."""
    reconnect: ReconnectConfig = ReconnectConfig()
    """Reconnection to a lost verifier."""

    @property
    def exchanges_on_device(self) -> bool:
        """Whether verifiers on other devices may exchange drafts and features directly with this
        drafter's device memory."""
        has_head = DraftMethod.EAGLE3 in self.methods
        return has_head and may_exchange(self.device_exchange, self.device)

    def __post_init__(self) -> None:
        _require(
            self.device_exchange in EXCHANGE_MODES,
            f"device_exchange must be one of {', '.join(EXCHANGE_MODES)}",
        )
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}")
        _require(bool(self.methods), "methods must name at least one way of drafting")
        _require(DraftMethod.NONE not in self.methods, "methods: none is not a way of drafting")
        _require(len(set(self.methods)) == len(self.methods), "methods must not repeat")
        _require(
            not {DraftMethod.EAGLE, DraftMethod.EAGLE3} <= set(self.methods),
            "methods: one head serves, eagle or eagle3",
        )
        if {DraftMethod.EAGLE, DraftMethod.EAGLE3} & set(self.methods):
            _require(bool(self.head), "the methods eagle3 and eagle need `head`, a directory")
        if DraftMethod.MODEL in self.methods:
            _require(bool(self.draft_model), "the method model needs `draft_model`, a directory")
        for name in (
            "max_sessions",
            "max_context",
            "head_kv_rows",
            "exchange_kv_rows",
            "max_backlog",
            "max_unsent_batches",
        ):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.threads >= 0, "threads must not be negative")
        _require(self.drain_timeout_s >= 0.0, "drain_timeout_s must not be negative")
        _require(0.0 <= self.stall_s < math.inf, "stall_s must be finite and not negative")
        check_level(self.log_level)
        check_hooks(self.hooks)
        self.tls.for_fleet()
        check_request(self.busy_polling_cores, self.device)
        _require(self.head_max_context >= 0, "head_max_context must not be negative")
        _require(self.draft_model_kv_tokens >= 0, "draft_model_kv_tokens must not be negative")
        _require(-1 <= self.metrics_port <= 65535, "metrics_port must be in [-1, 65535]")
