"""Internal messages between router, verifier and drafter, as plain dataclasses.

Nothing outside `outrider.wire` sees generated protobuf code. `outrider.wire.codec` converts each of
these messages to bytes and back, and validates every field that a peer could get wrong. Arrays are
numpy arrays. bfloat16 values are sent as uint16 with a dtype tag of their own (`WireTensor`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.ids import DrafterId, SessionId, VerifierId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import SamplingParams
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.thinking_budget import ThinkingBudget
from outrider.spec.token_limits import TokenLimits
from outrider.wire.arrays import FeatureRows as FeatureRows
from outrider.wire.arrays import TensorDtype as TensorDtype
from outrider.wire.arrays import WireTensor as WireTensor
from outrider.wire.device_exchange import MemoryKind as MemoryKind
from outrider.wire.device_exchange import ReplicaAnswer as ReplicaAnswer
from outrider.wire.device_exchange import ReplicaBlocksAdded as ReplicaBlocksAdded
from outrider.wire.device_exchange import ReplicaCommand as ReplicaCommand
from outrider.wire.device_exchange import ReplicaOffer as ReplicaOffer
from outrider.wire.device_exchange import ReplicaReady as ReplicaReady
from outrider.wire.device_exchange import ReplicaRefused as ReplicaRefused
from outrider.wire.device_exchange import ReplicaRoundLaunched as ReplicaRoundLaunched
from outrider.wire.device_exchange import ReplicaSessionBegin as ReplicaSessionBegin
from outrider.wire.device_exchange import ReplicaSessionEnd as ReplicaSessionEnd
from outrider.wire.logprobs import EventLogprobs as EventLogprobs
from outrider.wire.logprobs import TokenLogprobs
from outrider.wire.rounds import DraftDistributions as DraftDistributions
from outrider.wire.rounds import Proposal as Proposal
from outrider.wire.rounds import Proposals as Proposals
from outrider.wire.rounds import Verdict as Verdict
from outrider.wire.rounds import Verdicts as Verdicts
from outrider.wire.server_info import AttachedDrafter as AttachedDrafter
from outrider.wire.server_info import DeviceExchangeInfo as DeviceExchangeInfo
from outrider.wire.server_info import DrafterInfo as DrafterInfo
from outrider.wire.server_info import FeatureLayout as FeatureLayout
from outrider.wire.server_info import VerifierInfo as VerifierInfo
from outrider.wire.stats import SpecStats as SpecStats

PROTOCOL_VERSION = 2
"""Version of the wire protocol. It increases with every incompatible change. Peers with another
version are refused (`check_protocol`). 0.1 speaks version 1.
"""

# ---- exchange: drafter -> verifier -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a drafter on an exchange connection."""

    protocol_version: int
    drafter_id: DrafterId
    incarnation: str
    """Random value that the process chooses when it starts. It distinguishes a restarted drafter
    from a stalled one.
    """
    vocab_size: int
    """Size of the vocabulary that the token ids of drafts belong to. It must equal the verifier's.
    """
    tokenizer_hash: str
    """SHA-256 of tokenizer.json; "" if the drafter has none, in which case only `vocab_size` is
    compared.
    """
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    feature_fingerprint: str
    """Fingerprint of the EAGLE head's feature projection. It must equal the verifier's unless
    `feature_layout` is NONE.
    """
    supports_shm: bool = False
    """Whether the drafter can use a shared-memory channel (`outrider.transport.shm`)."""
    feature_offsets: bool = False
    """Whether the drafter supports `Verdicts.feature_offsets`."""
    version: str = ""
    """Version of the drafter's package; "" from 0.1."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Message that shows that the sender's event loop is alive. `sequence` increases with every
    heartbeat.
    """

    sequence: int


@dataclass(frozen=True, slots=True)
class SessionsLost:
    """Message that the drafter cannot draft for these sessions any more, unless they are announced
    again.
    """

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShmAnswer:
    """A drafter's answer to a `Welcome` that offers a shared-memory channel. If the drafter has
    joined the channel, later messages about sessions use it.
    """

    is_joined: bool


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message that is already encoded by the thread that produced it. Its segments may be views
    of memory that a later round overwrites; `copy_owned` makes a copy that can be kept.
    """

    segments: tuple[bytes | memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return sum(map(len, self.segments))

    @property
    def data(self) -> bytes:
        """The encoded message as one bytes object."""
        (first, *others) = self.segments
        return first if isinstance(first, bytes) and not others else b"".join(self.segments)

    def copy_owned(self) -> EncodedMessage:
        """Return a copy in memory that nothing else writes to."""
        return EncodedMessage((self.data,))


DrafterMessage = (
    Hello | ShmAnswer | Proposals | SessionsLost | Heartbeat | ReplicaAnswer | EncodedMessage
)

# ---- exchange: verifier -> drafter -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOffer:
    """Offer of a shared-memory channel to a peer on the same host, which joins the channel with
    this name and token.
    """

    name: str
    """Name of the listening socket: 32 hexadecimal digits."""
    token: bytes = field(repr=False)
    """Secret of 16 bytes with which the peer identifies itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The verifier's answer to `Hello`. An incompatible drafter receives an error status
    instead."""

    protocol_version: int
    verifier_id: VerifierId
    incarnation: str
    shm_offer: ShmOffer | None = None
    """Offer of a shared-memory channel that a drafter on the same host may join; None if there is
    none.
    """
    version: str = ""
    """Version of the verifier's package; "" from 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Message that announces a session to its drafter. Verdicts with the prompt follow."""

    handle: int
    """Number of the session on this connection until its SessionEnd. Handles are small and are used
    again for later sessions.
    """
    session_id: SessionId
    """Id of the session, used only in logs."""
    epoch: int
    plan: SpeculationPlan
    sampling: SamplingParams
    max_len: int
    """Largest length in tokens (prompt and output) that the session can reach."""
    prompt_len: int
    """Number of tokens of the prefix that belong to the prompt. Penalties treat prompt and output
    differently.
    """
    structured_output: StructuredOutput | None = None
    """Grammar of the output; None if unrestricted."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the session; empty without a structured output. The grammar allows them
    where the output is complete.
    """
    token_limits: TokenLimits | None = None
    """Allowed token ids and bad words of the output; None if there are none."""
    traceparent: str = ""
    """W3C Trace Context (`traceparent`) of the span below which the session's spans are; "" if the
    session is not traced.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Message that the router has changed the speculation plan of a session."""

    handle: int
    plan: SpeculationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """Message that the drafter no longer serves a session and must free the session's state."""

    handle: int


VerifierMessage = (
    Welcome
    | SessionStart
    | Verdicts
    | PlanChange
    | SessionEnd
    | Heartbeat
    | ReplicaCommand
    | EncodedMessage
)

# ---- control: router -> verifier ---------------------------------------------------------------


class FinishReason(StrEnum):
    """Reason why a session's token stream ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    """A stop string ended the answer. Only routers report this, because verifiers do not see
    text."""
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """Everything that a verifier needs to serve a session."""

    session_id: SessionId
    epoch: int
    token_ids: tuple[int, ...]
    """Token ids of the prefix: the prompt, and after a failover also all tokens that were already
    emitted.
    """
    prompt_len: int
    max_new_tokens: int
    """Largest number of tokens that the session may emit, not counting those in `token_ids`."""
    stop_token_ids: tuple[int, ...]
    """Token ids that end the session when one of them is emitted. That stop token is part of the
    output.
    """
    min_new_tokens: int = 0
    """Number of tokens that must be emitted before stop tokens are allowed. Until then they are
    masked.
    """
    sampling: SamplingParams
    plan: SpeculationPlan
    drafter_id: DrafterId | None = None
    """Id of the drafter that serves the session; None decodes without drafts."""
    priority: int = 0
    """Priority in [-MAX_PRIORITY, MAX_PRIORITY]. Higher priorities are served first and may preempt
    lower ones.
    """
    top_logprobs: int | None = None
    """Number of most probable ids to return with each emitted token, in [0, MAX_TOP_LOGPROBS]. 0
    returns only the emitted tokens' log-probabilities, None returns none.
    """
    structured_output: StructuredOutput | None = None
    """Grammar of the answer; None if unrestricted."""
    token_limits: TokenLimits | None = None
    """Allowed token ids and bad words of the answer; None if there are none."""
    thinking_budget: ThinkingBudget | None = None
    """Limit of the reasoning in the answer; None if it is not limited. Drafters are not told:
    drafts beyond the limit are rejected."""
    traceparent: str = ""
    """W3C Trace Context (`traceparent`) of the span below which the session's spans are; "" if the
    session is not traced.
    """


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Request to serve a session. Later messages refer to the session by its handle."""

    handle: int
    """Number that the router chooses for the session. No number is used twice on one stream."""
    spec: SessionSpec


@dataclass(frozen=True, slots=True)
class SessionLeave:
    """Request to free a session, because the router no longer reads its events."""

    handle: int


@dataclass(frozen=True, slots=True)
class MalformedOpen:
    """Result of decoding a `SessionOpen` with an invalid specification."""

    handle: int
    error: InvalidMessageError


@dataclass(frozen=True, slots=True)
class SessionMove:
    """Request to move a session to another drafter; `SessionMoved` is the answer."""

    handle: int
    drafter_id: DrafterId | None
    """The new drafter, or None to decode without speculation."""


SessionsRequest = SessionOpen | SessionLeave | SessionMove | Heartbeat
"""Message of a router on its session stream."""

# ---- control: verifier -> router ---------------------------------------------------------------

DRAFTER_ATTACHED = 1
"""Event flag: a drafter is attached to the session."""
FALLBACK = 2
"""Event flag: the session's plan is speculative, but there was no proposal for the round."""
TARGET_ONLY = 4
"""Event flag: the session has the rejection rule, but the round used the target-only rule because
the draft distribution was missing.
"""
PAUSED = 8
"""Event flag: the planner decoded the session without speculation."""
DECISION_SHIFT = 4
"""Lowest bit of a two-bit field of the event flags. The field holds the reason of the planner's
decision, or 0 if the planner decides nothing.
"""
PLANNED = PAUSED | 3 << DECISION_SHIFT
"""Mask of the event flags that describe the planner's decision."""
LOOKED_AHEAD = 64
"""Event flag: the session's plan has look-ahead, and the session wanted a proposal for the round.
"""
LOOK_AHEAD_HIT = 128
"""Event flag, only set together with LOOKED_AHEAD: the proposal arrived before its prefix was
known. If LOOKED_AHEAD is set without this flag and without FALLBACK, the proposal arrived only
after the prefix was known.
"""
REASON_CODES = {
    FinishReason.STOP_TOKEN: 1,
    FinishReason.STOP_STRING: 2,
    FinishReason.LENGTH: 3,
    FinishReason.CANCELLED: 4,
}
"""Codes of finish reasons in `SessionEvents`. The code 0 means that the session continues."""
REASONS = (None, *REASON_CODES)
"""Finish reasons, indexed by code: the inverse of `REASON_CODES`."""
MALFORMED_ROW = 255
"""Finish reason that the decoder gives to an invalid row of `SessionEvents`. It ends the row's
session.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionEvents:
    """Tokens that sessions emitted in a round, as columns with n rows. A session has at most one
    row.
    """

    handles: NDArray[np.uint32]
    """Handles of the sessions, [n]."""
    round_ids: NDArray[np.uint32]
    """Round number of each row, [n]; 0 for the token that prefill emits."""
    counts: NDArray[np.uint32]
    """Number of token ids that each row emits, [n]."""
    tokens: NDArray[np.int32]
    """Emitted token ids, [sum(counts)], row by row."""
    finish_reasons: NDArray[np.uint8]
    """Finish reasons as codes of `REASON_CODES`, [n]; 0 unless the row is its session's last."""
    flags: NDArray[np.uint8]
    """Bits of the event flags of each row (DRAFTER_ATTACHED to LOOK_AHEAD_HIT), [n]."""
    proposed: NDArray[np.uint16]
    """Number of draft nodes verified in the round, [n]."""
    accepted: NDArray[np.uint16]
    """Number of draft nodes accepted in the round, [n]. Nodes after the end of the session are not
    counted.
    """
    logprobs: EventLogprobs | None = None
    """Log-probabilities of the emitted tokens; None if no session asked for them."""
    cached_tokens: NDArray[np.uint32] | None = None
    """On the first row of a session, the number of its prompt's tokens whose KV was in the prefix
    cache when the verifier first admitted the session, [n]; 0 on all other rows. None if it is 0 in
    all rows.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """Message that a session was refused or has failed. No further messages about it follow."""

    handle: int
    code: str
    """Name of the gRPC status code."""
    kind: str
    """Class name of the error."""
    message: str
    reason: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SessionMoved:
    """Answer to a `SessionMove`: the drafter that the session has now, whether or not the move was
    carried out.
    """

    handle: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class SessionsDraining:
    """Message with which a verifier says that it is about to stop. Routers should move its sessions
    to other verifiers.
    """

    seconds: float
    """Time in seconds until the verifier stops."""


SessionsMessage = SessionEvents | SessionFailure | SessionMoved | SessionsDraining | Heartbeat
"""Message of a verifier on a router's session stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """Tokens that one session emitted in one round."""

    session_id: SessionId
    epoch: int
    round_id: int
    """Number of the round; 0 for the token that prefill emits."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Finish reason of the session; None except in the last event."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Cumulative statistics of the session."""
    drafter_attached: bool = False
    """Whether a drafter is attached to the session."""
    cached_tokens: int = 0
    """In the first event, the number of the prompt's tokens whose KV was in the prefix cache when
    the verifier first admitted the session; 0 in all later events."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities, with one entry for each of `tokens` if the session asked for them;
    otherwise empty.
    """
