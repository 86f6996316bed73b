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
    """How a lost verifier is dialled again."""

    min_backoff_s: float = 0.1
    """Pause before the first new attempt; doubled at each further one, with jitter."""
    max_backoff_s: float = 5.0
    """Longest pause."""
    handshake_timeout_s: float = 5.0
    """Longest wait for the verifier's answer to `Hello`."""
    attach_wait_s: float = 1.0
    """How long `attach` waits for the outcome of the first attempt; it goes on in any case."""

    def __post_init__(self) -> None:
        _require(
            0.0 < self.min_backoff_s <= self.max_backoff_s,
            "0 < min_backoff_s <= max_backoff_s must hold",
        )
        _require(self.handshake_timeout_s > 0.0, "handshake_timeout_s must be positive")
        _require(self.attach_wait_s >= 0.0, "attach_wait_s must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Prompt lookup."""

    max_match: int = 4
    """Longest suffix that is looked up, tokens."""
    min_match: int = 2
    """Shortest suffix that counts as a match, tokens."""

    def __post_init__(self) -> None:
        _require(1 <= self.min_match <= self.max_match, "1 <= min_match <= max_match must hold")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Everything a drafter process is told."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT of the control service; port 0 takes a free one."""
    model: str = ""
    """The target, a directory or a pulled model's name: vocabulary, tokenizer hash, embedding."""
    head: str = ""
    """Directory of an EAGLE head; needed by the methods eagle3 and eagle."""
    draft_model: str = ""
    """A small model (directory or name) with the target's tokenizer; needed by the method model."""
    methods: tuple[DraftMethod, ...] = (DraftMethod.EAGLE3, DraftMethod.NGRAM)
    """Ways of drafting to offer."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Element type of the draft models: float32, bfloat16 or float16."""
    device: str = "cpu"
    """torch device of the draft models."""
    cuda_graphs: bool = True
    """Whether a CUDA device runs a head's drafts as captured graphs; off, kernel by kernel."""
    threads: int = 0
    """Threads of torch's CPU operators; 0 measures which number is fastest, on a CPU."""
    busy_polling_cores: int = 0
    """Cores kept from going idle while sessions are served, for threads that wake at once; with an
    accelerator only. A process that does rounds with others over gRPC uses 3."""
    shared_memory: bool = True
    """Whether to exchange with verifiers of this host through shared memory, from working thread to
    working thread (Linux); off, and with other hosts, over the connection."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether to exchange with verifiers of this host between the devices, where a verifier may:
    on, off, or auto, which is on where this process computes on a GPU; for eagle3 heads."""
    exchange_kv_rows: int = 1 << 22
    """Most K/V rows of the head for all verifiers of device_exchange together: one for each of
    their K/V tokens. A verifier for which no room is left is refused, and exchanges by messages."""
    drafter_id: str = field(default_factory=lambda: f"drafter-{secrets.token_hex(4)}")
    """Stable name; give one, so that a restarted drafter is recognised."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 takes a free one, -1 serves none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint."""
    health_listen: str = ""
    """HOST:PORT of a port that serves grpc.health.v1.Health alone, in plain text: for a supervisor
    on this machine. Port 0 takes a free one, "" serves none."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of requests, for OpenTelemetry."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Level of the log on stderr."""
    drain_timeout_s: float = 10.0
    """After SIGTERM, how long routers may take to give its sessions to others."""
    stall_s: float = 10.0
    """Time without a step of drafting while there is something to draft, after which the drafting
    thread is taken for hung: health says NOT_SERVING, the verifiers are left, and the process ends
    with status 3 so that it is started again. Loading, compilation and graph capture do not count.
    0 watches nothing."""
    max_sessions: int = 1024
    """Sessions followed at most, which routers are told; beyond it the verifier with most of them
    gives up its least recently used one."""
    limit_look_ahead_time: bool = True
    """Whether look-ahead is cut to the time until the next verdict; off, passes are made whole."""
    max_context: int = 131072
    """Longest session followed, tokens."""
    head_kv_rows: int = 131072
    """Rows of draft K/V that all sessions of a head may hold together."""
    head_max_context: int = 0
    """Longest context of a head, draft positions; 0 takes the head's own limit."""
    draft_model_kv_tokens: int = 0
    """Tokens of K/V that all sessions of the small model may reserve together; 0 takes 131072 on a
    GPU, or what half of its free memory holds, 16384 elsewhere. On a GPU those that are drafted
    from the host have up to 16384 of their own."""
    max_backlog: int = 4096
    """Messages of a verifier that may wait for the drafting thread before it is read no further."""
    max_unsent_batches: int = 1024
    """Draft batches that may wait for a slow connection; beyond it the oldest are dropped."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """This process's certificate, for its own ports and for those that it connects to."""
    trace_file: str = ""
    """Where the process leaves a timeline of its last events when it ends; "" keeps none."""
    hooks: tuple[str, ...] = ()
    """Code of the operator's own that runs in this process: modules, each "MODULE" or
    "MODULE:KEY=VALUE,KEY=VALUE", that are imported before the process is built. Each has a function
    `install(hooks, *, key=...)`, which is given the hook points of the process
    (`outrider_drafter.hooks`) and the options. A variable lists hooks with several options as TOML
    does."""
    ngram: NgramConfig = NgramConfig()
    """Prompt lookup."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits of compiling the grammar of a structured output."""
    grammar_masks: MaskLimits = field(default_factory=MaskLimits)
    """Limits of computing the masks of a session with a structured output."""
    reconnect: ReconnectConfig = ReconnectConfig()
    """How a lost verifier is dialled again."""

    @property
    def exchanges_on_device(self) -> bool:
        """Whether verifiers on other devices may exchange with this one's memory."""
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
