"""Information that verifiers and drafters give about themselves: identity, capacity, load."""

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
    """Output of the EAGLE head's `fc` projection, H values for each token. The verifier computes
    it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedDrafter:
    """A drafter as a verifier sees it."""

    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    sessions: int
    answer_ms: float = 0.0
    """Recent mean time in milliseconds from the end of a round to the arrival of the drafter's
    proposals; 0 if unknown.
    """
    same_host: bool = False
    """Whether the drafter is known to run on the verifier's host."""
    answers: int = 0
    """Number of usable proposals since the verifier started."""
    proposal_timeouts: int = 0
    """Number of proposal timeouts since the verifier started."""
    invalid: int = 0
    """Number of invalid messages and proposals of the drafter since the verifier started."""
    silent_ms: float = 0.0
    """Time in milliseconds for which a session has been waiting without any message from the
    drafter; 0 if no session waits.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceExchangeInfo:
    """State of a device exchange, which passes drafts and features directly between the devices of
    a verifier and a drafter.
    """

    drafter_id: DrafterId | None = None
    """Id of the drafter with which the exchange is open. If it is None, the exchange is not open,
    and drafts are sent as messages.
    """
    memory: MemoryKind | None = None
    """Memory that the exchange buffers are in; None unless the exchange is open."""
    draft_length: int = 0
    """Number of tokens in a draft chain."""
    idle_us_p50: float = 0.0
    """Median time in microseconds for which the verifier's device was idle before a round, over
    recent rounds of `idle_rows` rows.
    """
    idle_rows: int = 0
    """Most frequent number of decode rows (one for each session, plus padding) in recent rounds; 0
    before the first measurement.
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
    """Median time in milliseconds of the target's forward pass in recent rounds."""
    overhead_ms_p50: float = 0.0
    """Median time in milliseconds of recent rounds, without the target's forward pass and without
    waiting for drafts.
    """
    in_process_methods: tuple[DraftMethod, ...] = ()
    """Draft methods of the in-process drafter; sessions that use them have no separate drafter."""
    in_process_draft_length: int = 0
    """Number of draft tokens per round of the in-process drafter; 0 if there is none."""
    simulated_acceptance: str = ""
    """Rates at which drafts are accepted at random (benchmarks only); empty otherwise."""
    planner: str = ""
    """Text with the planner's decision for each workload class; empty if the planner decides
    nothing.
    """
    stats: SpecStats = field(default_factory=SpecStats)
    """Speculation statistics of all sessions since the start."""
    hit_idle_us_p50: float = 0.0
    """Median time in microseconds from the end of a round to the launch of the next one, over
    rounds in which all sessions use drafts made by look-ahead (hits); 0 without such rounds.
    """
    draining: bool = False
    """Whether the verifier refuses new sessions because it is about to stop."""
    waiting_sessions: int = 0
    """Number of sessions that have no KV blocks, because they were preempted or have not started.
    """
    preemptions_swap: int = 0
    """Number of preemptions since the start in which the KV was copied to host memory."""
    preemptions_recompute: int = 0
    """Number of preemptions since the start in which the KV was dropped, to be computed again."""
    prefix_cache_query_tokens: int = 0
    """Number of tokens looked up in the prefix cache since the start."""
    prefix_cache_hit_tokens: int = 0
    """Number of tokens found in the prefix cache since the start."""
    engine_steps: int = 0
    """Number of engine steps since the start. It grows as long as sessions make progress, even
    within a long round and while sessions wait for proposals.
    """
    device_exchange: DeviceExchangeInfo | None = None
    """State of the device exchange; None if it is off."""
    version: str = ""
    """Version of the verifier's package; "" from 0.1."""


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
    """Artificial slow-down of the drafter in benchmarks; empty otherwise."""
    draining: bool = False
    """Whether the drafter is about to stop. Its sessions should then move to other drafters."""
    max_sessions: int = 0
    """Largest number of sessions that the drafter can serve at the same time; 0 if unknown."""
    version: str = ""
    """Version of the drafter's package; "" from 0.1."""
