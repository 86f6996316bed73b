"""Configuration of the verifier process: the fields of `VerifierConfig` are its TOML keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from outrider.busy_polling import check_request
from outrider.config import OneOf
from outrider.config.hooks import check_hooks
from outrider.grammar.limits import CompileLimits, MaskLimits
from outrider.logs import LOG_LEVELS, check_level
from outrider.spans import TracingConfig
from outrider.spec.exchange_mode import AUTO, EXCHANGE_MODES, ON, may_exchange
from outrider.spec.plan import MAX_DRAFT_TOP_K
from outrider.transport.tls import TlsConfig
from outrider.wire.messages import TensorDtype
from outrider_verifier.state.preemption_mode import PreemptionMode
from outrider_verifier.state.simulated_acceptance import parse_rates

DTYPES = ("float32", "bfloat16")
SEPARATE, COLOCATED, FUSED = PLACEMENTS = ("separate", "colocated", "fused")
MAX_IN_PROCESS_DRAFT_LENGTH = 64
"""Most draft tokens a round of an in-process drafter."""
MAX_EXCHANGE_TIMEOUT_MS = 1000.0
"""Longest wait of a round for drafts of device_exchange, ms."""
MAX_EXCHANGE_FAN_OUT = 32
"""Most outcomes of a round that are drafted for while it runs."""
MAX_EXCHANGE_AHEAD_SESSIONS = 16
"""Most sessions of a round whose outcomes are drafted for."""
MAX_EXCHANGE_DISTRIBUTION_IDS = 4096
"""Most ids of a draft distribution of device_exchange."""
DEFAULT_KV_TOKENS = 32768
"""KV budget where none is given and the size of the device's memory does not set one."""
PLANNERS = AUTOMATIC_PLANNER, FIXED_PLANNER = ("automatic", "fixed")
AUTOMATIC_PREEMPTION = "auto"
PREEMPTION_MODES = (AUTOMATIC_PREEMPTION, *(way.value for way in PreemptionMode))

AUTOMATIC = -1.0
CPU_CEILING_S, CUDA_CEILING_S = 0.2, 0.04
CPU_GATHER_ROUNDS, CUDA_GATHER_S = 2.0, 0.005
CPU_PREFILL, CUDA_PREFILL = 256, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """Settings of a verifier. Raises ValueError for values out of range."""

    model: str = ""
    """Target checkpoint: a safetensors directory, a .gguf file or a pulled model's name."""
    verifier_id: str = "verifier-0"
    """Identity, stable across restarts."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the gRPC server; port 0 picks a free one."""
    feature_head: str = ""
    """Draft head checkpoint whose feature projection runs here; empty serves no features."""
    placement: Annotated[str, OneOf(PLACEMENTS)] = SEPARATE
    """Where drafts are made: separate (by drafters that attach), colocated (by the head of
    `feature_head` in this process), fused (the same, in one CUDA graph with the target)."""
    draft_length: int = 4
    """Draft tokens a round of an in-process drafter; the positions that simulated_acceptance
    speaks of."""
    draft_top_k: int = 1
    """Children that an in-process drafter tries of a node; 1 drafts chains, more grow trees of
    draft_length nodes."""
    draft_tree_nodes: int = 16
    """Draft tokens of the trees that an in-process drafter makes in place of chains where few
    sessions decode and trees are faster; 0: it makes chains alone. With the planner, where
    draft_top_k is 1."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether to exchange drafts and features with a drafter on another GPU of this host without
    passing them through the host: on, off, or auto, which is on where this process computes on a
    GPU with a `feature_head` and chains, in separate placement. Drafts then have `draft_length`
    tokens, and who cannot be reached so exchanges by messages."""
    exchange_timeout_ms: float = 30.0
    """Longest wait of a round for drafts of device_exchange, ms. The round decodes plainly then,
    and no further round waits before the drafter has caught up."""
    exchange_fan_out: int = 16
    """Outcomes of a round that a drafter by device_exchange drafts for while the round runs, a
    session; 0 drafts behind the round alone."""
    exchange_ahead_sessions: int = 1
    """Sessions of a round, at most, for which exchange_fan_out counts: a round waits for no draft
    only where the outcomes of all its sessions were drafted for."""
    exchange_distribution_ids: int = 2048
    """Ids of a draft distribution that comes with each draft token of device_exchange under the
    rejection rule, at most; fewer where all sessions would take more than 64 MiB. 0: drafts come
    without, and the rejection rule judges them target-only."""
    simulated_acceptance: str = ""
    """Benchmarks with random weights only: drafts are accepted by chance. The mean number of tokens
    a round ("2.6"), or the conditional rate of each draft position ("0.8,0.6,0.4,0.2"); empty is
    off."""
    cuda_graphs: bool = True
    """Whether rounds are replayed from CUDA graphs; without, kernels are launched one by one."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Compute dtype of the target, float32 or bfloat16; features cross the wire in it."""
    device: str = "cpu"
    """torch device of the target."""
    threads: int = 0
    """Compute threads of torch; 0 measures which number is fastest, where it computes on a CPU."""
    busy_polling_cores: int = 0
    """Cores kept from going idle while sessions are served, for threads that wake at once; with an
    accelerator only. One that does rounds with drafters in other processes uses 3."""
    kv_tokens: int = 0
    """KV budget: tokens of all sessions together, prompt, output and draft nodes; 0 takes what
    `memory_fraction` of a CUDA device leaves, 32768 elsewhere."""
    memory_fraction: float = 0.9
    """Share of the device's memory that may be used, weights included, where kv_tokens is 0."""
    kv_block_tokens: int = 16
    """Tokens in one KV block."""
    prefix_cache: bool = True
    """Whether sessions begin with K/V of others that began alike, in whole blocks: what sessions
    leave behind is kept until its blocks are needed. Who can time first tokens can find out what
    others have asked."""
    max_sessions: int = 64
    """Sessions that run at once, with K/V; others wait."""
    max_waiting: int = 64
    """Sessions beyond these that may wait, preempted ones included; one more is refused with
    RESOURCE_EXHAUSTED."""
    kv_watermark: float = 0.01
    """Share of the K/V blocks that stays free when sessions are admitted, besides a block for each
    that runs: what they grow into."""
    max_preemptions: int = 4
    """How often one session may be preempted; the last time it comes back only with all the blocks
    that it may ever need. 0 preempts nobody: every session is admitted so."""
    preemption: Annotated[str, OneOf(PREEMPTION_MODES)] = AUTOMATIC_PREEMPTION
    """How a preempted session gets its K/V back: swap (from host memory, within swap_space_gb),
    recompute (from its tokens), or auto, whichever is measured to cost less."""
    swap_space_gb: float = 4.0
    """Host memory for the K/V of preempted sessions, taken as it is needed (on a CUDA device
    pinned, and taken at the start); 0 never swaps."""
    priority_aging_s: float = 10.0
    """A waiting session's priority counts one more for every so many seconds that it has waited."""
    max_context_len: int = 0
    """Longest prompt + output in tokens; 0 takes the model's own limit."""
    max_tree_nodes: int = 64
    """Largest proposal that is verified; larger ones are invalid."""
    prefill_tokens_per_round: int = 0
    """Prompt tokens of all sessions in one round, beside those that decode; also the size of a
    catch-up verdict. More make first tokens faster and tokens after them slower. 0 is automatic:
    256 on a CPU, 2048 on a CUDA device, where 4096 is the maximum."""
    decode_tokens_per_round: int = 1024
    """Verify rows (roots and nodes) of all sessions in one round."""
    batch_wait_ms: float = -1.0
    """How long a ready row waits for other rows' proposals, so that they share a forward; -1: 5 ms
    on a CUDA device, where a round of more rows takes hardly longer, and as long as two rounds take
    on a CPU, where a drafter of the same cores is done sooner if no round runs beside it."""
    planner: Annotated[str, OneOf(PLANNERS)] = AUTOMATIC_PLANNER
    """Whether sessions speculate, how long their drafts are and how long they wait for them:
    automatic follows what is measured, within their plans; fixed carries plans out as they are."""
    max_proposals_per_session: int = 64
    """Proposals kept per session for prefixes that may come about with the next round; the newest
    stay."""
    proposal_memory_mb: int = 64
    """Memory of all proposals that are kept; past it the oldest messages go."""
    feature_budget_mb: int = 512
    """Host memory for features of live sessions; past it a lost drafter is not caught up. With
    prefix_cache those of kept prefixes may take as much."""
    drafter_queue_mb: int = 256
    """Unsent messages to one drafter; a drafter that lets more pile up is disconnected."""
    shared_memory: bool = True
    """Whether drafters of this host exchange with this process through shared memory, its engine
    thread with their drafting thread, and streams of sessions with routers of this host go the same
    way (Linux); off, and for other hosts, over the connection."""
    heartbeat_ms: int = 500
    """Interval of heartbeats on exchanges and session streams."""
    peer_timeout_ms: int = 2000
    """A drafter that was silent for this long is lost."""
    router_silence_ms: int = 10000
    """A router that was silent for this long is lost, and its sessions with it; longer than for
    drafters, for a router that is held up for some seconds loses nothing else."""
    stall_s: float = 10.0
    """Time without a finished round while sessions wait, after which the engine is taken for hung:
    health says NOT_SERVING, sessions fail with ENGINE_STALLED, and the process ends with status 3
    so that it is started again. Loading, compilation and graph capture do not count, and each layer
    of a forward counts as progress. 0 watches nothing."""
    handshake_timeout_s: float = 5.0
    """How long a new exchange connection may take to say hello."""
    drain_timeout_s: float = 20.0
    """After SIGTERM, how long running sessions may take to finish."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 takes a free one, -1 serves none."""
    metrics_host: str = "127.0.0.1"
    """Interface of the Prometheus endpoint."""
    health_listen: str = ""
    """HOST:PORT of a port that serves grpc.health.v1.Health alone, in plain text: for a supervisor
    on this machine. Port 0 takes a free one, "" serves none."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """This process's certificate, for its own ports and for those that it connects to."""
    hooks: tuple[str, ...] = ()
    """Code of the operator's own that runs in this process: modules, each "MODULE" or
    "MODULE:KEY=VALUE,KEY=VALUE", that are imported before the process is built. Each has a function
    `install(hooks, *, key=...)`, which is given the hook points of the process
    (`outrider_verifier.hooks`) and the options. A variable lists hooks with several options as TOML
    does."""
    trace_file: str = ""
    """Where the process leaves a timeline of its last events when it ends; "" keeps none."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits of compiling the grammar of a structured output."""
    grammar_masks: MaskLimits = field(default_factory=MaskLimits)
    """Limits of computing the masks of a session with a structured output."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of requests, for OpenTelemetry."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Level of the log on stderr."""

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}")
        for name in (
            "kv_block_tokens",
            "max_sessions",
            "max_tree_nodes",
            "decode_tokens_per_round",
            "max_proposals_per_session",
            "proposal_memory_mb",
            "drafter_queue_mb",
            "heartbeat_ms",
        ):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in (
            "kv_tokens",
            "prefill_tokens_per_round",
            "threads",
            "max_context_len",
            "max_waiting",
            "max_preemptions",
            "swap_space_gb",
            "feature_budget_mb",
            "drain_timeout_s",
            "stall_s",
        ):
            _require(getattr(self, name) >= 0, f"{name} must not be negative")
        check_level(self.log_level)
        check_hooks(self.hooks)
        self._check_drafting()
        self.tls.for_fleet()
        check_request(self.busy_polling_cores, self.device)
        _require(
            self.batch_wait_ms == AUTOMATIC or self.batch_wait_ms >= 0,
            "batch_wait_ms must be -1 or >= 0",
        )
        _require(self.priority_aging_s > 0.0, "priority_aging_s must be positive")
        _require(0.0 <= self.kv_watermark < 1.0, "kv_watermark must be in [0, 1)")
        _require(
            self.preemption in PREEMPTION_MODES,
            f"preemption must be one of {', '.join(PREEMPTION_MODES)}",
        )
        _require(0.0 < self.memory_fraction <= 1.0, "memory_fraction must be in (0, 1]")
        _require(self.handshake_timeout_s > 0.0, "handshake_timeout_s must be positive")
        _require(-1 <= self.metrics_port <= 65535, "metrics_port must be in [-1, 65535]")
        for name in ("peer_timeout_ms", "router_silence_ms"):
            _require(getattr(self, name) > self.heartbeat_ms, f"{name} must exceed heartbeat_ms")
        _require(bool(self.verifier_id), "verifier_id must not be empty")
        _require(self.planner in PLANNERS, f"planner must be one of {', '.join(PLANNERS)}")

    @property
    def is_on_cuda(self) -> bool:
        """Whether the target computes on a CUDA device; else on cores that drafters share."""
        return self.device.startswith("cuda")

    @property
    def batch_wait_s(self) -> float:
        """`batch_wait_ms` in seconds, with the automatic value resolved where that is a time."""
        if self.batch_wait_ms != AUTOMATIC:
            return self.batch_wait_ms / 1000.0
        return CUDA_GATHER_S if self.is_on_cuda else 0.0

    @property
    def batch_wait_rounds(self) -> float:
        """The automatic value where that is a number of rounds; 0: it is a time."""
        automatic = self.batch_wait_ms == AUTOMATIC and not self.is_on_cuda
        return CPU_GATHER_ROUNDS if automatic else 0.0

    @property
    def max_proposal_wait_s(self) -> float:
        """The longest wait for a proposal where the planner chooses it, unless two rounds take
        longer: what a stopped drafter costs."""
        return CUDA_CEILING_S if self.is_on_cuda else CPU_CEILING_S

    @property
    def resolved_prefill_tokens(self) -> int:
        """`prefill_tokens_per_round` with the automatic value resolved."""
        automatic = CUDA_PREFILL if self.is_on_cuda else CPU_PREFILL
        return self.prefill_tokens_per_round or automatic

    @property
    def feature_dtype(self) -> TensorDtype:
        """Element type in which features cross the wire: the target's own."""
        return TensorDtype(self.dtype)

    @property
    def preemption_mode(self) -> PreemptionMode | None:
        """How preempted sessions get their K/V back; None: as `preemption` says of auto."""
        return None if self.preemption == AUTOMATIC_PREEMPTION else PreemptionMode(self.preemption)

    @property
    def has_in_process_drafter(self) -> bool:
        """Whether a head drafts in this process."""
        return self.placement != SEPARATE

    @property
    def in_process_tree_nodes(self) -> int:
        """Draft tokens of trees of the in-process drafter beside its chains; 0: there are none."""
        chooses = self.planner == AUTOMATIC_PLANNER and not self.simulated_acceptance
        if not (self.has_in_process_drafter and chooses and self.draft_top_k == 1):
            return 0
        nodes = min(self.draft_tree_nodes, self.max_tree_nodes)
        return nodes if nodes > self.draft_length else 0

    @property
    def exchanges_on_device(self) -> bool:
        """Whether a drafter on another device may exchange with this one's memory."""
        if self.has_in_process_drafter or not may_exchange(self.device_exchange, self.device):
            return False
        fits = self.draft_top_k == 1 and self.draft_length <= self.max_tree_nodes
        return self.device_exchange == ON or (fits and bool(self.feature_head))

    @property
    def simulated_rates(self) -> tuple[float, ...]:
        """Conditional acceptance rates by draft position; empty where nothing is simulated."""
        return parse_rates(self.simulated_acceptance, self.draft_length)

    def _check_drafting(self) -> None:
        placements = ", ".join(PLACEMENTS)
        _require(self.placement in PLACEMENTS, f"placement must be one of {placements}")
        _require(
            1 <= self.draft_length <= MAX_IN_PROCESS_DRAFT_LENGTH,
            f"draft_length must be in [1, {MAX_IN_PROCESS_DRAFT_LENGTH}]",
        )
        _require(
            0 <= self.draft_tree_nodes <= MAX_IN_PROCESS_DRAFT_LENGTH,
            f"draft_tree_nodes must be in [0, {MAX_IN_PROCESS_DRAFT_LENGTH}]",
        )
        _require(
            1 <= self.draft_top_k <= MAX_DRAFT_TOP_K,
            f"draft_top_k must be in [1, {MAX_DRAFT_TOP_K}]",
        )
        _require(
            self.draft_top_k == 1 or not self.simulated_acceptance,
            "simulated_acceptance is for chains: draft_top_k must be 1",
        )
        if self.has_in_process_drafter:
            _require(bool(self.feature_head), f"{self.placement} needs `feature_head`, a head")
            _require(
                self.draft_length <= self.max_tree_nodes,
                "draft_length must not be greater than max_tree_nodes",
            )
        _require(
            0.0 < self.exchange_timeout_ms <= MAX_EXCHANGE_TIMEOUT_MS,
            f"exchange_timeout_ms must be in (0, {MAX_EXCHANGE_TIMEOUT_MS:g}]",
        )
        _require(
            0 <= self.exchange_fan_out <= MAX_EXCHANGE_FAN_OUT,
            f"exchange_fan_out must be in [0, {MAX_EXCHANGE_FAN_OUT}]",
        )
        _require(
            1 <= self.exchange_ahead_sessions <= MAX_EXCHANGE_AHEAD_SESSIONS,
            f"exchange_ahead_sessions must be in [1, {MAX_EXCHANGE_AHEAD_SESSIONS}]",
        )
        _require(
            0 <= self.exchange_distribution_ids <= MAX_EXCHANGE_DISTRIBUTION_IDS,
            f"exchange_distribution_ids must be in [0, {MAX_EXCHANGE_DISTRIBUTION_IDS}]",
        )
        _require(
            self.device_exchange in EXCHANGE_MODES,
            f"device_exchange must be one of {', '.join(EXCHANGE_MODES)}",
        )
        if self.exchanges_on_device:
            _require(bool(self.feature_head), "device_exchange needs `feature_head`, a head")
            _require(self.draft_top_k == 1, "device_exchange is for chains: draft_top_k must be 1")
            _require(
                self.draft_length <= self.max_tree_nodes,
                "draft_length must not be greater than max_tree_nodes",
            )
        parse_rates(self.simulated_acceptance, self.draft_length)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
