"""Self-description of a verifier or drafter: identity, capacity, load."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.ids import DrafterId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.wire.device_exchange import MemoryKind
from outrider.wire.stats import SpecStats


class FeatureLayout(StrEnum):
    """Target features that a drafter needs with each verdict."""

    NONE = "none"
    PROJECTED = "projected"
    """H values per token after the head's `fc` projection, which the verifier applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedDrafter:
    """A drafter as a verifier sees it."""

    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    sessions: int
    answer_ms: float = 0.0
    """Recent mean time from the end of a round to the drafter's proposals in milliseconds; 0 if
    unknown.
    """
    same_host: bool = False
    """Whether the drafter is known to be on the verifier's host."""
    answers: int = 0
    """Number of usable proposals since the verifier started."""
    proposal_timeouts: int = 0
    """Number of proposal timeouts since the verifier started."""
    invalid: int = 0
    """Number of invalid messages and proposals since the verifier started."""
    silent_ms: float = 0.0
    """Time in milliseconds that a session has waited without any message from the drafter; 0 if no
    session waits.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExchangeInfo:
    """Exchange of drafts and features between the devices of a verifier and a drafter."""

    drafter_id: DrafterId | None = None
    """Drafter with which the exchange is open; None if it is not open, so that drafts are sent as
    messages.
    """
    memory: MemoryKind | None = None
    """Memory that the exchange buffers are in; None unless the exchange is open."""
    draft_length: int = 0
    """Number of tokens in a draft."""
    idle_us_p50: float = 0.0
    """Median idle time before a round in microseconds, over recent rounds of `idle_rows` rows."""
    idle_rows: int = 0
    """Most frequent number of decode rows in recent rounds, including padding; 0 before the first
    measurement.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierInfo:
    """Identity, capacity and load of a verifier."""

    protocol_version: int
    verifier_id: VerifierId
    incarnation: str
    model_name: str
    vocab_size: int
    tokenizer_hash: str
    max_context_len: int
    kv_block_tokens: int
    kv_total_blocks: int
    kv_free_blocks: int
    sessions: int
    max_sessions: int
    drafters: tuple[AttachedDrafter, ...]
    feature_fingerprint: str = ""
    rounds_total: int = 0
    tokens_total: int = 0
    dtype: str = "float32"
    round_ms_p50: float = 0.0
    """Median wall time of recent rounds in milliseconds."""
    forward_ms_p50: float = 0.0
    """Median time in the target forward pass of recent rounds in milliseconds."""
    overhead_ms_p50: float = 0.0
    """Median time of recent rounds in milliseconds without the target forward pass and without
    waiting for drafts.
    """
    in_process_methods: tuple[DraftMethod, ...] = ()
    """Draft methods of the in-process drafter; sessions that use them have no separate drafter."""
    in_process_draft_length: int = 0
    """Draft tokens per round of the in-process drafter; 0 if there is none."""
    simulated_acceptance: str = ""
    """Rates at which drafts are accepted at random (benchmarks only); empty otherwise."""
    planner: str = ""
    """Decisions of the planner by workload class; empty if it decides nothing."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Speculation statistics of all sessions since the start."""
    hit_idle_us_p50: float = 0.0
    """Median time in microseconds between the end of a round and the submission of a round in which
    all sessions have hits; 0 without such rounds.
    """
    draining: bool = False
    """Whether the verifier refuses new sessions because it is about to stop."""
    waiting_sessions: int = 0
    """Number of sessions without KV: preempted, or not started."""
    preemptions_swap: int = 0
    """Preemptions since the start whose KV was kept in host memory."""
    preemptions_recompute: int = 0
    """Preemptions since the start whose KV was dropped."""
    prefix_cache_query_tokens: int = 0
    """Number of tokens looked up in the prefix cache since the start."""
    prefix_cache_hit_tokens: int = 0
    """Number of tokens found in the prefix cache since the start."""
    engine_steps: int = 0
    """Number of engine steps since the start. It grows while sessions make progress, also within a
    long round and while they wait for proposals.
    """
    device_exchange: DeviceExchangeInfo | None = None
    """Device exchange with a drafter; None if it is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """Identity and load of a drafter."""

    protocol_version: int
    drafter_id: DrafterId
    incarnation: str
    vocab_size: int
    tokenizer_hash: str
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    feature_fingerprint: str
    sessions: int
    verifiers: tuple[str, ...]
    """Addresses of the verifiers to which the drafter is connected."""
    draft_ms_p50: float = 0.0
    handicap: str = ""
    """How benchmarks slow the drafter down; empty otherwise."""
    draining: bool = False
    """Whether the drafter is about to stop, so that its sessions should move to others."""
    max_sessions: int = 0
    """Largest number of sessions that the drafter serves at once; 0 if unknown."""
