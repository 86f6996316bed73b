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
"""Raised with every incompatible change; peers with another version are refused."""

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
    supports_shm: bool = False
    """Whether the drafter can have a shared-memory channel (`outrider.transport.shm`)."""
    feature_offsets: bool = False
    """Whether it knows `Verdicts.feature_offsets`."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Says that the sender's event loop is alive; `sequence` counts up."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SessionsLost:
    """Sessions that the drafter cannot follow any more, unless they are announced again."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShmAnswer:
    """Answers a `Welcome` with a shared-memory channel; what follows about sessions goes by it if
    it was joined."""

    is_joined: bool


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message that is encoded already, so that the thread that made it also does that; only
    sending knows this form. Features may lie where their round left them; what carries them to the
    memory of their reader copies them from there, unless that is where they are. `owned` is for
    what is sent later."""

    segments: tuple[bytes | memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return sum(map(len, self.segments))

    @property
    def data(self) -> bytes:
        """The message in one piece."""
        (first, *others) = self.segments
        return first if isinstance(first, bytes) and not others else b"".join(self.segments)

    def copy_owned(self) -> EncodedMessage:
        """The same in memory that nothing else writes to."""
        return EncodedMessage((self.data,))


DrafterMessage = (
    Hello | ShmAnswer | Proposals | SessionsLost | Heartbeat | ReplicaAnswer | EncodedMessage
)

# ---- exchange: verifier -> drafter -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOffer:
    """Where a drafter of the verifier's host finds its shared-memory channel."""

    name: str
    """32 hexadecimal digits."""
    token: bytes = field(repr=False)
    """[16]: what the drafter shows there; a secret of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The verifier's answer to `Hello`; a misfit is answered by an error status instead."""

    protocol_version: int
    verifier_id: VerifierId
    incarnation: str
    shm_offer: ShmOffer | None = None
    """What a drafter of the same host may join; None where the drafter can have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Announces a session to its drafter; verdicts with the prompt follow."""

    handle: int
    """Names the session on this connection until its SessionEnd; small numbers, used again."""
    session_id: SessionId
    """For logs."""
    epoch: int
    plan: SpeculationPlan
    sampling: SamplingParams
    max_len: int
    """Upper bound of the session's length in tokens (prompt + output)."""
    prompt_len: int
    """Tokens of the prefix that are prompt (penalties treat prompt and output differently)."""
    structured_output: StructuredOutput | None = None
    """The form that the output must have; None: any."""
    stop_token_ids: tuple[int, ...] = ()
    """Said beside a structured output: ids that end the session, legal where that is complete."""
    token_limits: TokenLimits | None = None
    """Which ids the output may be made of; None: all."""
    traceparent: str = ""
    """As in `SessionSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The router changed a session's plan."""

    handle: int
    plan: SpeculationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The session is over for this drafter; free its state."""

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
    """Tokens still to emit at most."""
    stop_token_ids: tuple[int, ...]
    """Emitting one of these ends the session; the stop token itself is emitted."""
    min_new_tokens: int = 0
    """Stop tokens are masked until this many tokens were emitted."""
    sampling: SamplingParams
    plan: SpeculationPlan
    drafter_id: DrafterId | None = None
    """The drafter that serves the session; None decodes plainly."""
    priority: int = 0
    """Greater goes first, and may preempt lesser ones; in [-MAX_PRIORITY, MAX_PRIORITY]."""
    top_logprobs: int | None = None
    """Most probable ids to report with each emitted token, in [0, MAX_TOP_LOGPROBS]; 0 reports the
    emitted tokens' log-probabilities alone, None reports none."""
    structured_output: StructuredOutput | None = None
    """The form that the answer must have; None: any."""
    token_limits: TokenLimits | None = None
    """Which ids the answer may be made of; None: all."""
    traceparent: str = ""
    """W3C Trace Context of the span that the session's belong to; "": it is not traced."""


@dataclass(frozen=True, slots=True)
class SessionOpen:
    """Serve a session; what follows for it carries its handle."""

    handle: int
    """Chosen by the router; never used twice on one stream."""
    spec: SessionSpec


@dataclass(frozen=True, slots=True)
class SessionLeave:
    """Free a session: nobody reads its events any more."""

    handle: int


@dataclass(frozen=True, slots=True)
class MalformedOpen:
    """What decoding makes of a `SessionOpen` whose spec makes no sense."""

    handle: int
    error: InvalidMessageError


@dataclass(frozen=True, slots=True)
class SessionMove:
    """Let another drafter draft for a session; `SessionMoved` answers."""

    handle: int
    drafter_id: DrafterId | None
    """None: nobody, it decodes plainly."""


SessionsRequest = SessionOpen | SessionLeave | SessionMove | Heartbeat
"""What a router says on the stream that carries its sessions."""

# ---- control: verifier -> router ---------------------------------------------------------------

DRAFTER_ATTACHED = 1
"""Flag of an event: the session's drafter is alive at this moment."""
FALLBACK = 2
"""Flag of an event: the plan is speculative but there was no proposal."""
TARGET_ONLY = 4
"""Flag of an event: a rejection round judged target-only, because the draft distribution was
missing."""
PAUSED = 8
"""Flag of an event: the planner had the session decode plainly."""
DECISION_SHIFT = 4
"""From this bit on a flag of two bits: why the planner did so, or not; 0: it decides nothing."""
PLANNED = PAUSED | 3 << DECISION_SHIFT
"""All flags of the planner."""
LOOKED_AHEAD = 64
"""Flag of an event: the plan has look-ahead, and the round used a proposal or wanted one."""
LOOK_AHEAD_HIT = 128
"""Flag of such an event: its proposal had come before its prefix did. With neither this one nor
FALLBACK the proposal was made for a prefix that was there."""
REASON_CODES = {
    FinishReason.STOP_TOKEN: 1,
    FinishReason.STOP_STRING: 2,
    FinishReason.LENGTH: 3,
    FinishReason.CANCELLED: 4,
}
"""Finish reasons in columns of events; 0: the session goes on."""
REASONS = (None, *REASON_CODES)
"""The inverse of `REASON_CODES`."""
MALFORMED_ROW = 255
"""Finish reason that decoding gives to a row which makes no sense; it ends its session."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionEvents:
    """What the sessions of a round emitted: a row a session, in columns of n rows."""

    handles: NDArray[np.uint32]
    """[n] as the sessions were opened."""
    round_ids: NDArray[np.uint32]
    """[n] counts a session's rounds; 0 for the token that prefill emits."""
    counts: NDArray[np.uint32]
    """[n] newly committed ids of each row."""
    tokens: NDArray[np.int32]
    """[sum(counts)] those ids, row after row."""
    finish_reasons: NDArray[np.uint8]
    """[n] codes of `REASON_CODES`, 0 unless the row is its session's last."""
    flags: NDArray[np.uint8]
    """[n] DRAFTER_ATTACHED | FALLBACK | TARGET_ONLY | LOOKED_AHEAD | HIT | flags of PLANNED."""
    proposed: NDArray[np.uint16]
    """[n] draft nodes verified in the round."""
    accepted: NDArray[np.uint16]
    """[n] draft nodes accepted, those that a stop cut off not counted."""
    logprobs: EventLogprobs | None = None
    """None: no session of these asked for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFailure:
    """A session was refused or failed; nothing follows for it."""

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
    """Whose session it is after a `SessionMove`, done or not."""

    handle: int
    drafter_id: DrafterId | None


@dataclass(frozen=True, slots=True)
class SessionsDraining:
    """The verifier is about to stop: its sessions are to be taken elsewhere."""

    seconds: float
    """Until it stops, from now."""


SessionsMessage = SessionEvents | SessionFailure | SessionMoved | SessionsDraining | Heartbeat
"""What a verifier says on a router's stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """Committed tokens of one round of one session, for whoever follows a session by itself."""

    session_id: SessionId
    epoch: int
    round_id: int
    """0 for the token that prefill emits."""
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set on the last event only."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Cumulative."""
    drafter_attached: bool = False
    """Whether the session's drafter is alive at this moment."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens` where the session asked for them, else none."""
