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
    """H values a token, after the head's `fc`, applied on the verifier's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedDrafter:
    """A drafter as a verifier sees it."""

    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    sessions: int
    answer_ms: float = 0.0
    """From the end of a round to its proposals, mean of late; 0 while unknown."""
    same_host: bool = False
    """Whether it is known to be on the verifier's host."""
    answers: int = 0
    """Proposals that could be of use, since the verifier started; so the next two."""
    proposal_timeouts: int = 0
    """Waits for a proposal that ran into the session's proposal timeout."""
    invalid: int = 0
    """Malformed messages, and proposals that failed validation or were for sessions of others."""
    silent_ms: float = 0.0
    """How long a session has waited in vain with nothing heard of it since; 0: nobody misses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExchangeInfo:
    """Exchange of drafts and features between the devices of a verifier and a drafter."""

    drafter_id: DrafterId | None = None
    """The drafter with which the exchange is open; None: it is open with none, and drafts pass by
    messages."""
    memory: MemoryKind | None = None
    """Memory that the exchange buffers are in; None unless the exchange is open."""
    draft_length: int = 0
    """Tokens of a draft."""
    idle_us_p50: float = 0.0
    """Median idle time before a round, microseconds, over recent rounds of `idle_rows` rows."""
    idle_rows: int = 0
    """Decode rows of most recent rounds, padding included; 0: no idle time was measured yet."""


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
    """Median wall time of a round over the recent window."""
    forward_ms_p50: float = 0.0
    """Median time inside the target forward over the recent window."""
    overhead_ms_p50: float = 0.0
    """Median time of a round outside the target forward and outside waiting for drafts."""
    in_process_methods: tuple[DraftMethod, ...] = ()
    """Draft sources within the verifier itself; sessions that use them name no drafter."""
    in_process_draft_length: int = 0
    """Draft tokens a round of these sources; 0 without any."""
    simulated_acceptance: str = ""
    """Not empty: drafts are accepted by chance, at these rates, whatever they say (benchmarks
    only)."""
    planner: str = ""
    """What the planner has in force, by kind of session; empty: nothing is being decided."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Speculation of all its sessions since the start."""
    hit_idle_us_p50: float = 0.0
    """Median time between a round's end and the submission of one that is all hits, microseconds;
    0 without any."""
    draining: bool = False
    """Whether it takes no new sessions any more."""
    waiting_sessions: int = 0
    """Sessions without KV: preempted, or not begun."""
    preemptions_swap: int = 0
    """Preemptions since the start whose KV was kept in host memory."""
    preemptions_recompute: int = 0
    """Preemptions since the start whose KV was dropped."""
    prefix_cache_query_tokens: int = 0
    """Tokens of sessions that were let in without KV, since the start."""
    prefix_cache_hit_tokens: int = 0
    """Of these, tokens whose KV other sessions had left behind."""
    engine_steps: int = 0
    """Steps of the engine since the start: it grows while sessions make progress, also within one
    long round and while they wait for proposals."""
    device_exchange: DeviceExchangeInfo | None = None
    """Exchange with a drafter between devices; None: it is off."""


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
    """Addresses of the verifiers it is connected to."""
    draft_ms_p50: float = 0.0
    handicap: str = ""
    """Not empty: how it is slowed down (benchmarks only)."""
    draining: bool = False
    """Whether it is about to stop: its sessions are to be given to others."""
    max_sessions: int = 0
    """Most sessions that it drafts for at once; 0: not said."""
