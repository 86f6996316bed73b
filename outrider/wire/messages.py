"""Internal messages between router, verifier and drafter, as plain dataclasses.

Nothing outside `outrider.wire` sees generated protobuf code. `outrider.wire.codec` turns each of
these into bytes and back, and validates every field that a peer could get wrong.
Arrays are numpy; bfloat16 travels as uint16 under its own dtype tag (`WireTensor`).
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

PROTOCOL_VERSION = 1
"""Version of the wire protocol. It increases with every incompatible change; peers with another
version are refused.
"""

# ---- exchange: drafter -> verifier -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a drafter on an exchange connection."""

    protocol_version: int
    drafter_id: DrafterId
    incarnation: str
    """Random value of each process start, which distinguishes a restarted drafter from a stalled
    one."""
    vocab_size: int
    """Vocabulary size of the token ids in drafts; must equal the verifier's."""
    tokenizer_hash: str
    """sha256 of tokenizer.json, "" if the drafter has none (then only vocab_size is compared)."""
    methods: tuple[DraftMethod, ...]
    feature_layout: FeatureLayout
    feature_fingerprint: str
    """Fingerprint of the head's feature projection; must equal the verifier's unless NONE."""
    supports_shm: bool = False
    """Whether the drafter can have a shared-memory channel (`outrider.transport.shm`)."""
    feature_offsets: bool = False
    """Whether the drafter supports `Verdicts.feature_offsets`."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Shows that the sender's event loop is alive. `sequence` increases with every heartbeat."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SessionsLost:
    """Sessions that the drafter cannot draft for any more, unless they are announced again."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShmAnswer:
    """Answer to a `Welcome` with a shared-memory channel. If it was joined, later messages about
    sessions use the channel.
    """

    is_joined: bool


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message that its producing thread has already encoded. Segments may be views of memory that
    a later round overwrites; `copy_owned` makes a copy that can be kept.
    """

    segments: tuple[bytes | memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the message in bytes."""
        return sum(map(len, self.segments))

    @property
    def data(self) -> bytes:
        """The message as one bytes object."""
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
    """Address at which a drafter on the verifier's host finds its shared-memory channel."""

    name: str
    """32 hexadecimal digits."""
    token: bytes = field(repr=False)
    """Secret of 16 bytes with which the drafter identifies itself on the channel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The verifier's answer to `Hello`. An incompatible drafter receives an error status
    instead."""

    protocol_version: int
    verifier_id: VerifierId
    incarnation: str
    shm_offer: ShmOffer | None = None
    """Shared-memory channel that a drafter on the same host may join; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Announces a session to its drafter; verdicts with the prompt follow."""

    handle: int
    """Identifies the session on this connection until its SessionEnd; handles are small and
    reused.
    """
    session_id: SessionId
    """Id of the session, used only in logs."""
    epoch: int
    plan: SpeculationPlan
    sampling: SamplingParams
    max_len: int
    """Upper bound of the session's length in tokens (prompt + output)."""
    prompt_len: int
    """Number of tokens of the prefix that belong to the prompt (penalties treat prompt and output
    differently)."""
    structured_output: StructuredOutput | None = None
    """Grammar of the output; None if unrestricted."""
    stop_token_ids: tuple[int, ...] = ()
    """With a structured output, the ids that end the session; they are allowed where the output is
    complete.
    """
    token_limits: TokenLimits | None = None
    """Restrictions of the output's token ids; None if there are none."""
    traceparent: str = ""
    """W3C Trace Context of the parent of the session's spans; "" if the session is not traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The router changed a session's plan."""

    handle: int
    plan: SpeculationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The drafter no longer serves the session and must free its state."""

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
    """Why a session's token stream ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    """A stop string ended the answer. Only routers report this, because verifiers do not see
    text."""
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
    """Largest number of tokens still to emit."""
    stop_token_ids: tuple[int, ...]
    """Emitting one of these ends the session; the stop token itself is emitted."""
    min_new_tokens: int = 0
    """Stop tokens are masked until this many tokens were emitted."""
    sampling: SamplingParams
    plan: SpeculationPlan
    drafter_id: DrafterId | None = None
    """The drafter that serves the session; None decodes without drafts."""
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
    """Restrictions of the answer's token ids; None if there are none."""
    traceparent: str = ""
    """W3C Trace Context of the parent of the session's spans; "" if the session is not traced."""


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Request to serve a session. Later messages about the session have its handle."""

    handle: int
    """Chosen by the router; never used twice on one stream."""
    spec: SessionSpec


@dataclass(frozen=True, slots=True)
class SessionLeave:
    """Request to free a session whose events are not read any more."""

    handle: int


@dataclass(frozen=True, slots=True)
class MalformedOpen:
    """Result of decoding a `SessionOpen` whose specification is invalid."""

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
"""Event flag: the session's drafter is attached."""
FALLBACK = 2
"""Flag of an event: the plan is speculative but there was no proposal."""
TARGET_ONLY = 4
"""Event flag: a round under the rejection rule used target-only because the draft distribution was
missing.
"""
PAUSED = 8
"""Event flag: the planner decoded the session without speculation."""
DECISION_SHIFT = 4
"""Position of a two-bit field of the event flags: the reason of the planner's decision, or 0 if the
planner decides nothing.
"""
PLANNED = PAUSED | 3 << DECISION_SHIFT
"""Mask of all event flags of the planner."""
LOOKED_AHEAD = 64
"""Flag of an event: the plan has look-ahead, and the round used a proposal or wanted one."""
LOOK_AHEAD_HIT = 128
"""Event flag, with LOOKED_AHEAD: the proposal arrived before its prefix was known. Without this
flag and FALLBACK, the proposal was made for a known prefix.
"""
REASON_CODES = {
    FinishReason.STOP_TOKEN: 1,
    FinishReason.STOP_STRING: 2,
    FinishReason.LENGTH: 3,
    FinishReason.CANCELLED: 4,
}
"""Codes of finish reasons in columns of events; 0 means that the session continues."""
REASONS = (None, *REASON_CODES)
"""Finish reasons by code, the inverse of `REASON_CODES`."""
MALFORMED_ROW = 255
"""Finish reason that decoding gives to an invalid row, which ends the row's session."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionEvents:
    """Tokens that the sessions of a round emitted: n rows, at most one per session, as columns."""

    handles: NDArray[np.uint32]
    """Handles of the sessions, [n]."""
    round_ids: NDArray[np.uint32]
    """Round numbers of each session, [n]; 0 for the token that prefill emits."""
    counts: NDArray[np.uint32]
    """Number of newly committed ids of each row, [n]."""
    tokens: NDArray[np.int32]
    """The newly committed ids, [sum(counts)], row by row."""
    finish_reasons: NDArray[np.uint8]
    """Codes of `REASON_CODES`, [n]; 0 unless the row is its session's last."""
    flags: NDArray[np.uint8]
    """Event flags of each row, [n]."""
    proposed: NDArray[np.uint16]
    """Number of draft nodes verified in the round, [n]."""
    accepted: NDArray[np.uint16]
    """Number of draft nodes accepted, [n], without those after a stop."""
    logprobs: EventLogprobs | None = None
    """Log-probabilities of the ids; None if no session asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """A session was refused or failed; no further messages about it follow."""

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
    """Drafter of a session after a `SessionMove`, whether the move was carried out or not."""

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
    """Committed tokens of one round of one session."""

    session_id: SessionId
    epoch: int
    round_id: int
    """0 for the token that prefill emits."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Finish reason of the session; None except in the last event."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Cumulative statistics of the session."""
    drafter_attached: bool = False
    """Whether a drafter is attached to the session."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each of `tokens` if the session asked for them, else empty."""
