"""Configuration of the verifier process. The fields of `VerifierConfig` are the keys of its TOML
file."""

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
from outrider_verifier.state.simulated_acceptance import parse_length, parse_rates

DTYPES = ("float32", "bfloat16")
SEPARATE, COLOCATED, FUSED = PLACEMENTS = ("separate", "colocated", "fused")
MAX_IN_PROCESS_DRAFT_LENGTH = 64
"""Upper limit of the settings `draft_length` and `draft_tree_nodes`."""
MAX_EXCHANGE_TIMEOUT_MS = 1000.0
"""Upper limit of the setting `exchange_timeout_ms`."""
MAX_EXCHANGE_FAN_OUT = 32
"""Upper limit of the setting `exchange_fan_out`."""
MAX_EXCHANGE_AHEAD_SESSIONS = 16
"""Upper limit of the setting `exchange_ahead_sessions`."""
MAX_EXCHANGE_DISTRIBUTION_IDS = 4096
"""Upper limit of the setting `exchange_distribution_ids`."""
MIN_SHORTENED_CHAIN = 3
"""Minimum `draft_length` with which the planner may use chains that are one token shorter when many
sessions decode."""
DEFAULT_KV_TOKENS = 32768
"""KV budget in tokens if none is configured and the device's memory does not determine one."""
PLANNERS = AUTOMATIC_PLANNER, FIXED_PLANNER = ("automatic", "fixed")
AUTOMATIC_PREEMPTION = "auto"
PREEMPTION_MODES = (AUTOMATIC_PREEMPTION, *(way.value for way in PreemptionMode))

AUTOMATIC = -1.0
CPU_CEILING_S, CUDA_CEILING_S = 0.2, 0.02
CPU_GATHER_ROUNDS, CUDA_GATHER_S = 2.0, 0.005
CPU_PREFILL, CUDA_PREFILL = 256, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """Configuration of a verifier; the fields are the keys of its TOML file. Raises ValueError if a
    value is out of range."""

    model: str = ""
    """Target checkpoint: a safetensors directory, a .gguf file or a pulled model's name."""
    verifier_id: str = "verifier-0"
    """Unique id of this verifier; it must stay the same across restarts."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT of the gRPC server; port 0 picks a free port."""
    feature_head: str = ""
    """Draft head checkpoint whose feature projection runs in this process; if empty, drafters
    receive no features."""
    placement: Annotated[str, OneOf(PLACEMENTS)] = SEPARATE
    """Where drafts are made: separate (by drafter processes), colocated (by the head of
    `feature_head` in this process) or fused (the same, in one CUDA graph with the target)."""
    draft_length: int = 4
    """Draft tokens per round of an in-process drafter or of device_exchange; also the number of
    positions for simulated_acceptance. In rounds of at least 32 sessions the planner may use one
    draft token less, if draft_top_k is 1 and draft_length at least 3."""
    draft_top_k: int = 1
    """Branching factor of in-process drafts: 1 drafts chains, larger values grow trees of
    draft_length nodes."""
    draft_tree_nodes: int = 16
    """Draft tokens of the trees that the planner may use instead of in-process chains, when few
    sessions decode and trees are faster; 0 disables trees. It applies if draft_top_k is 1."""
    device_exchange: Annotated[str, OneOf(EXCHANGE_MODES)] = AUTO
    """Whether to exchange drafts and features directly with a drafter on another GPU of this host:
    on, off or auto. auto is on if this process computes on a GPU with a `feature_head` and chains,
    in separate placement. Drafts then have `draft_length` tokens. Drafters that cannot be reached
    this way exchange by messages."""
    exchange_timeout_ms: float = 20.0
    """Maximum time, in ms, that a round waits for drafts of device_exchange. After it the round
    decodes without drafts, and no round waits again before the drafter has caught up."""
    exchange_fan_out: int = 16
    """Outcomes per session for which a drafter by device_exchange makes drafts while the round
    runs; 0 drafts only after the round."""
    exchange_ahead_sessions: int = 1
    """Maximum number of sessions in a round for which exchange_fan_out applies. A round starts
    without waiting only if the outcomes of all its sessions have drafts."""
    exchange_distribution_ids: int = 2048
    """Maximum number of ids in the draft distribution sent with each draft token of device_exchange
    under the rejection rule; fewer if all sessions together would need more than 64 MiB. With 0 no
    distribution is sent, and the rejection rule uses target-only acceptance."""
    simulated_acceptance: str = ""
    """For benchmarks with random weights only: accept drafts at random. The value is the mean
    number of tokens per round ("2.6"), the conditional rate of each draft position
    ("0.8,0.6,0.4,0.2"), or "length:2.6" for rounds of 2 or 3 tokens in an order that keeps their
    running mean at 2.6, as public leaderboards require; empty disables it. Routers with API keys
    refuse such a verifier."""
    cuda_graphs: bool = True
    """Whether rounds are replayed from CUDA graphs; otherwise kernels are launched one by one."""
    batch_invariant: bool = False
    """Whether a token's KV and logits have the same bits whatever runs beside it: any draft, batch,
    prompt chunk or prefix hit. Greedy and coupled output is then the same with and without
    speculation. It needs dense weights, and a CPU needs a drafter in another process."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Compute dtype of the target, float32 or bfloat16; features are sent in the same dtype."""
    device: str = "cpu"
    """torch device of the target."""
    threads: int = 0
    """Number of torch's compute threads; 0 measures the fastest number if the device is a CPU."""
    busy_polling_cores: int = 0
    """CPU cores kept busy-polling while sessions are served, to reduce wake-up latency; with an
    accelerator only. A verifier with drafters in other processes uses 3."""
    kv_tokens: int = 0
    """KV cache size in tokens of all sessions together: prompts, outputs and draft nodes. 0 uses
    the memory that `memory_fraction` leaves on a CUDA device, and 32768 tokens elsewhere."""
    memory_fraction: float = 0.9
    """Share of the device's memory that may be used, weights included, if kv_tokens is 0."""
    kv_block_tokens: int = 16
    """Tokens per KV block."""
    prefix_cache: bool = True
    """Whether sessions reuse the KV blocks of earlier sessions with the same prompt prefix. Blocks
    are kept until their memory is needed. Disable it to close a cross-tenant timing side
    channel."""
    check_prefix_kv: bool = False
    """For debugging of batch_invariant: when the KV of a cached prefix was computed again, compare
    the bits of both, and log and count a difference. Each comparison waits for the device."""
    max_sessions: int = 64
    """Maximum number of sessions that run at once, with KV; others wait."""
    max_waiting: int = 64
    """Maximum number of further sessions that wait, including preempted ones; more are refused with
    RESOURCE_EXHAUSTED."""
    kv_watermark: float = 0.01
    """Share of the KV blocks that stays free for the growth of running sessions when sessions are
    admitted, in addition to one block per running session."""
    max_preemptions: int = 4
    """Maximum number of preemptions per session. After the last one it resumes only with all the
    blocks that it can ever need. With 0 every session is admitted that way and none is
    preempted."""
    preemption: Annotated[str, OneOf(PREEMPTION_MODES)] = AUTOMATIC_PREEMPTION
    """How a preempted session gets its KV back: swap (from host memory, within swap_space_gb),
    recompute (from its tokens) or auto (the cheaper one by measurement)."""
    swap_space_gb: float = 4.0
    """Host memory for the KV of preempted sessions. It is allocated on demand, but with a CUDA
    device at the start and pinned. 0 disables swapping."""
    priority_aging_s: float = 10.0
    """Seconds of waiting that raise a waiting session by one priority level."""
    max_context_len: int = 0
    """Maximum length of prompt and output in tokens; 0 uses the model's own limit."""
    max_tree_nodes: int = 64
    """Maximum number of nodes of a proposal; larger proposals are invalid."""
    prefill_tokens_per_round: int = 0
    """Maximum number of prompt tokens of all sessions in one round, next to decoding sessions; also
    the size of a catch-up verdict. Larger values make first tokens faster and later tokens slower.
    0 is automatic: 256 on a CPU and 2048 on a CUDA device, where 4096 is the maximum."""
    decode_tokens_per_round: int = 1024
    """Maximum number of verified rows (roots and nodes) of all sessions in one round."""
    batch_wait_ms: float = -1.0
    """Maximum time that a ready row waits for proposals of other rows, so that they share a forward
    pass. -1 is automatic: 5 ms on a CUDA device, where more rows hardly lengthen a round; the time
    of two rounds on a CPU, where a drafter on the same cores is faster while no round runs."""
    planner: Annotated[str, OneOf(PLANNERS)] = AUTOMATIC_PLANNER
    """Who decides whether sessions speculate, how long their drafts are and how long they wait for
    them: automatic decides from measurements within each session's plan; fixed uses the plans
    unchanged."""
    max_proposals_per_session: int = 64
    """Maximum number of proposals kept per session for prefixes that the next round may produce;
    the newest are kept."""
    proposal_memory_mb: int = 64
    """Maximum memory of all kept proposals; beyond it the oldest messages are dropped."""
    feature_budget_mb: int = 512
    """Maximum host memory for the features of live sessions; beyond it, sessions cannot be replayed
    to a new drafter. With prefix_cache, features of cached prefixes may use the same amount
    again."""
    drafter_queue_mb: int = 256
    """Maximum size of the unsent messages to one drafter; beyond it the drafter is disconnected."""
    shared_memory: bool = True
    """Whether exchanges with drafters on this host and session streams with routers on this host
    use shared memory (Linux). With other hosts, and if this is off, they use gRPC."""
    heartbeat_ms: int = 500
    """Interval of heartbeats on exchanges and session streams."""
    peer_timeout_ms: int = 2000
    """Time of silence after which a drafter counts as lost."""
    router_silence_ms: int = 10000
    """Time of silence after which a router and its sessions count as lost. It is longer than for
    drafters, so that a router that is blocked for some seconds keeps its sessions."""
    stall_s: float = 10.0
    """Time without a finished round, while sessions wait, after which the engine counts as hung:
    health reports NOT_SERVING, sessions fail with ENGINE_STALLED, and the process exits with status
    3 so that its supervisor restarts it. Loading, compilation and graph capture do not count; on a
    CPU each layer of a forward pass counts as progress. 0 disables the check."""
    handshake_timeout_s: float = 5.0
    """Maximum time from a new exchange connection to its hello message."""
    drain_timeout_s: float = 20.0
    """Maximum time that running sessions get after SIGTERM to move or finish."""
    metrics_port: int = -1
    """Port of the Prometheus endpoint; 0 picks a free port, -1 disables the endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint listens on."""
    health_listen: str = ""
    """HOST:PORT of an additional port that serves only grpc.health.v1.Health, in plain text, for a
    supervisor on this machine. Port 0 picks a free port, "" disables it."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    """This process's certificate, for its own ports and for those that it connects to."""
    hooks: tuple[str, ...] = ()
    """The operator's own modules that run in this process, each "MODULE" or
    "MODULE:KEY=VALUE,KEY=VALUE". They are imported before the process is built. Each has a function
    `install(hooks, *, key=...)` that receives the hook points of the process
    (`outrider_verifier.hooks`) and the options. An environment variable lists hooks with several
    options in TOML syntax."""
    trace_file: str = ""
    """File to which the process writes a timeline of its last events when it exits; "" writes
    none."""
    grammar_compile: CompileLimits = field(default_factory=CompileLimits)
    """Limits of compiling the grammar of a structured output."""
    grammar_masks: MaskLimits = field(default_factory=MaskLimits)
    """Limits of computing the masks of a session with a structured output."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of requests, for OpenTelemetry."""
    log_level: Annotated[str, OneOf(LOG_LEVELS)] = "INFO"
    """Lowest log level that is written to stderr."""

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
        """Whether the target computes on a CUDA device. On a CPU, the target shares the cores with
        drafters."""
        return self.device.startswith("cuda")

    @property
    def batch_wait_s(self) -> float:
        """The setting `batch_wait_ms` in seconds. Its automatic value is 5 ms on a CUDA device. On
        a CPU it is a number of rounds: `batch_wait_rounds` returns it, and this property is 0."""
        if self.batch_wait_ms != AUTOMATIC:
            return self.batch_wait_ms / 1000.0
        return CUDA_GATHER_S if self.is_on_cuda else 0.0

    @property
    def batch_wait_rounds(self) -> float:
        """Automatic value of the setting `batch_wait_ms` on a CPU, as a number of rounds. It is 0
        on a CUDA device or if the setting is not automatic; then `batch_wait_s` applies."""
        automatic = self.batch_wait_ms == AUTOMATIC and not self.is_on_cuda
        return CPU_GATHER_ROUNDS if automatic else 0.0

    @property
    def max_proposal_wait_s(self) -> float:
        """Maximum time, in seconds, for which the planner lets a session wait for a proposal. If
        two rounds take longer, the maximum is their time. A drafter that stops delays its sessions
        by this time."""
        return CUDA_CEILING_S if self.is_on_cuda else CPU_CEILING_S

    @property
    def resolved_prefill_tokens(self) -> int:
        """The setting `prefill_tokens_per_round`, or its automatic value for this device if it is
        0."""
        automatic = CUDA_PREFILL if self.is_on_cuda else CPU_PREFILL
        return self.prefill_tokens_per_round or automatic

    @property
    def feature_dtype(self) -> TensorDtype:
        """Element type of features in messages, which is the target's dtype."""
        return TensorDtype(self.dtype)

    @property
    def preemption_mode(self) -> PreemptionMode | None:
        """How preempted sessions get their KV back; None if `preemption` is auto."""
        return None if self.preemption == AUTOMATIC_PREEMPTION else PreemptionMode(self.preemption)

    @property
    def has_in_process_drafter(self) -> bool:
        """Whether a draft head makes drafts in this process."""
        return self.placement != SEPARATE

    @property
    def in_process_tree_nodes(self) -> int:
        """Number of draft tokens of the trees that the in-process drafter may make instead of
        chains; 0 if it makes no such trees."""
        chooses = self.planner == AUTOMATIC_PLANNER and not self.simulated_acceptance
        if not (self.has_in_process_drafter and chooses and self.draft_top_k == 1):
            return 0
        nodes = min(self.draft_tree_nodes, self.max_tree_nodes)
        return nodes if nodes > self.draft_length else 0

    @property
    def short_chain_tokens(self) -> int:
        """Number of draft tokens of the shorter chains that the planner may use when many sessions
        decode; 0 if it uses none."""
        chooses = self.planner == AUTOMATIC_PLANNER and not self.simulated_acceptance
        is_chain = self.draft_top_k == 1 and self.draft_length >= MIN_SHORTENED_CHAIN
        drafts = self.has_in_process_drafter or self.exchanges_on_device
        return self.draft_length - 1 if chooses and is_chain and drafts else 0

    @property
    def exchanges_on_device(self) -> bool:
        """Whether a drafter on another device may exchange drafts and features with this process
        directly."""
        if self.has_in_process_drafter or not may_exchange(self.device_exchange, self.device):
            return False
        fits = self.draft_top_k == 1 and self.draft_length <= self.max_tree_nodes
        return self.device_exchange == ON or (fits and bool(self.feature_head))

    @property
    def simulated_rates(self) -> tuple[float, ...]:
        """Conditional acceptance rates by draft position; empty if acceptance is not simulated."""
        return parse_rates(self.simulated_acceptance, self.draft_length)

    @property
    def simulated_length(self) -> float:
        """Scheduled mean number of tokens of a round of simulated acceptance; 0 if no length is
        scheduled."""
        return parse_length(self.simulated_acceptance, self.draft_length)

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
        parse_length(self.simulated_acceptance, self.draft_length)
        drafts_here = self.has_in_process_drafter or self.exchanges_on_device
        _require(
            not self.batch_invariant or self.is_on_cuda or not drafts_here,
            f"batch_invariant on device {self.device} needs placement {SEPARATE} without "
            "device_exchange",
        )


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
