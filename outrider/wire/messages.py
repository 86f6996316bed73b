"""Domain messages: what the three processes say to each other, as plain dataclasses.

Nothing outside `outrider.wire` sees generated protobuf code. `outrider.wire.codec` turns each of
these into bytes and back, and validates every field that a peer could get wrong.
Arrays are numpy; bfloat16 travels as uint16 under its own dtype tag (`WireTensor`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.law import DraftLaw
from outrider.spec.plan import DraftMethod, Plan
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import DraftTree

PROTOCOL_VERSION = 1
"""Raised with every incompatible change; peers with another version are refused."""


class TensorDtype(StrEnum):
    """Element types that may cross the wire."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"
    UINT16 = "uint16"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WireTensor:
    """A dense array with its wire dtype; bfloat16 data is held as uint16 bit patterns."""

    dtype: TensorDtype
    data: NDArray[np.generic]


class FeatureLayout(StrEnum):
    """What target features a drafter wants with each verdict."""

    NONE = "none"
    PROJECTED = "projected"
    """H values a token, after the head's `fc`, applied on the verifier's side."""


# ---- exchange: drafter -> verifier -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a drafter on an exchange connection."""

    protocol_version: int
    drafter_id: DrafterId
    incarnation: str
    """Random per process start; tells a restarted drafter from a stalled one."""
    vocab_size: int
    """Size of the id space that drafts are written in; must equal the verifier's."""
    tokenizer_hash: str
    """sha256 of tokenizer.json, "" if the drafter has none (then only vocab_size is compared)."""
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    feature_fingerprint: str
    """Fingerprint of the head's feature projection; must equal the verifier's unless NONE."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A draft tree, usable iff `prefix_digest` is the session's current one.

    A tree without nodes says that there is no draft for this prefix: the verifier decodes it
    plainly at once instead of waiting for its patience to end.
    """

    session_id: SessionId
    prefix_digest: int
    """64-bit digest of the committed prefix (root included) that the tree continues."""
    prefix_len: int
    """Number of tokens in that prefix, prompt and root included."""
    tree: DraftTree
    law: DraftLaw | None = None
    """Draft probabilities by expanded node; None unless the rule needs them."""
    draft_us: int = 0
    """Time spent drafting, microseconds."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that the sender's event loop is alive; `sequence` counts up."""

    sequence: int


DrafterMessage = Hello | Proposal | Heartbeat

# ---- exchange: verifier -> drafter -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The verifier's answer to `Hello`; a misfit is answered by an error status instead."""

    protocol_version: int
    verifier_id: VerifierId
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Announces a session to its drafter; verdicts with the prompt follow."""

    session_id: SessionId
    epoch: int
    plan: Plan
    sampling: SamplingParams
    max_len: int
    """Upper bound of the session's length in tokens (prompt + output)."""
    prompt_len: int
    """Tokens of the prefix that are prompt (penalties treat prompt and output differently)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """What became committed: tokens, and the features of positions whose K/V is now written.

    Prefill is a verdict too: its tokens are the prompt and the first sampled token. A chunked
    prefill sends one verdict per chunk; only the last one has `draft_wanted`.
    Invariant after each verdict with features: num_features == num_tokens - 1 (the root's K/V is
    unwritten) once prefill is complete.
    """

    session_id: SessionId
    epoch: int
    round_id: int
    start: int
    """Index of the first token of `tokens` in the session's prefix."""
    tokens: NDArray[np.int32]
    """[n] newly committed ids; the last one is the new root when `draft_wanted`."""
    prefix_digest: int
    """Digest of the prefix after `tokens`."""
    feature_start: int
    """Index of the first position covered by `features`."""
    features: WireTensor | None
    """[m, H] projected features of positions feature_start .. feature_start + m - 1."""
    draft_wanted: bool
    """Whether a proposal for the new prefix is expected."""
    accepted_nodes: tuple[int, ...] = ()
    """Indices of the nodes that stood, in the proposal with `proposal_digest`."""
    proposal_digest: int = 0
    """Prefix digest of the proposal that this round verified; 0 if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The router changed a session's plan."""

    session_id: SessionId
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The session is over for this drafter; free its state."""

    session_id: SessionId


VerifierMessage = Welcome | SessionStart | Verdict | PlanChange | SessionEnd | Heartbeat

# ---- control: router -> verifier ---------------------------------------------------------------


class FinishReason(StrEnum):
    """Why a session's token stream ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    """Decided by the router, which sees text; a verifier never reports it."""
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Everything a verifier needs to serve a session."""

    session_id: SessionId
    epoch: int
    token_ids: tuple[int, ...]
    """The prefix: the prompt, then (after a failover) every token already emitted."""
    prompt_len: int
    max_new_tokens: int
    """Tokens still to emit at most."""
    stop_token_ids: tuple[int, ...]
    """Emitting one of these ends the session; the stop token itself is emitted."""
    min_new_tokens: int = 0
    """Stop tokens are masked until this many tokens were emitted."""
    sampling: SamplingParams
    plan: Plan
    drafter_id: DrafterId | None = None
    """The drafter that serves the session; None decodes plainly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """Speculation counters of one session, cumulative."""

    rounds: int = 0
    """Verify forwards of this session that emitted tokens (prefill not counted)."""
    emitted: int = 0
    """Tokens emitted by those rounds."""
    proposed: int = 0
    """Draft nodes verified."""
    accepted: int = 0
    """Draft nodes accepted."""
    fallback_rounds: int = 0
    """Rounds without a proposal although the plan is speculative."""
    target_only_rounds: int = 0
    """Rejection rounds judged target-only because the draft law was missing."""
    accepted_per_depth: tuple[int, ...] = ()
    """How often a draft token at depth d (1-based, index d-1) stood."""
    paused_rounds: int = 0
    """Rounds decoded plainly because the verifier's planner had found that faster."""
    decision: str = ""
    """What its planner had in force for the newest round and why: "speculate/faster"; empty: the
    plan was carried out as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """Committed tokens of one round, the light copy of a verdict for the router."""

    session_id: SessionId
    epoch: int
    round_id: int
    """0 for the token that prefill emits."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last event only."""
    stats: SpecStats = field(default_factory=SpecStats)
    drafter_attached: bool = False
    """Whether the session's drafter is alive at this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedDrafter:
    """A drafter as a verifier sees it."""

    drafter_id: DrafterId
    incarnation: str
    methods: tuple[DraftMethod, ...]
    sessions: int


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
    own_methods: tuple[DraftMethod, ...] = ()
    """Draft sources within the verifier itself; sessions that use them name no drafter."""
    own_draft_length: int = 0
    """Draft tokens a round of these sources; 0 without any."""
    simulated_acceptance: str = ""
    """Not empty: drafts stand by chance, at these rates, whatever they say (benchmarks only)."""
    planner: str = ""
    """What the planner has in force, by kind of session; empty: nothing is being decided."""


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
