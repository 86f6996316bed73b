from outrider.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeRequest(_message.Message):
    __slots__ = ("hello", "proposals", "heartbeat", "sessions_lost", "shm_answer", "replica_ready", "replica_refused", "bundle")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_LOST_FIELD_NUMBER: _ClassVar[int]
    SHM_ANSWER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_READY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_REFUSED_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proposals: Proposals
    heartbeat: _common_pb2.Heartbeat
    sessions_lost: SessionsLost
    shm_answer: ShmAnswer
    replica_ready: ReplicaReady
    replica_refused: ReplicaRefused
    bundle: _containers.RepeatedCompositeFieldContainer[ExchangeRequest]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proposals: _Optional[_Union[Proposals, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., sessions_lost: _Optional[_Union[SessionsLost, _Mapping]] = ..., shm_answer: _Optional[_Union[ShmAnswer, _Mapping]] = ..., replica_ready: _Optional[_Union[ReplicaReady, _Mapping]] = ..., replica_refused: _Optional[_Union[ReplicaRefused, _Mapping]] = ..., bundle: _Optional[_Iterable[_Union[ExchangeRequest, _Mapping]]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("welcome", "session_start", "verdicts", "plan_change", "session_end", "heartbeat", "replica_offer", "replica_session_begin", "replica_blocks_added", "replica_session_end", "replica_round_launched", "bundle")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SESSION_START_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_CHANGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_END_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_OFFER_FIELD_NUMBER: _ClassVar[int]
    REPLICA_SESSION_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REPLICA_BLOCKS_ADDED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_SESSION_END_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ROUND_LAUNCHED_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    session_start: SessionStart
    verdicts: Verdicts
    plan_change: PlanChange
    session_end: SessionEnd
    heartbeat: _common_pb2.Heartbeat
    replica_offer: ReplicaOffer
    replica_session_begin: ReplicaSessionBegin
    replica_blocks_added: ReplicaBlocksAdded
    replica_session_end: ReplicaSessionEnd
    replica_round_launched: ReplicaRoundLaunched
    bundle: _containers.RepeatedCompositeFieldContainer[ExchangeResponse]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., session_start: _Optional[_Union[SessionStart, _Mapping]] = ..., verdicts: _Optional[_Union[Verdicts, _Mapping]] = ..., plan_change: _Optional[_Union[PlanChange, _Mapping]] = ..., session_end: _Optional[_Union[SessionEnd, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., replica_offer: _Optional[_Union[ReplicaOffer, _Mapping]] = ..., replica_session_begin: _Optional[_Union[ReplicaSessionBegin, _Mapping]] = ..., replica_blocks_added: _Optional[_Union[ReplicaBlocksAdded, _Mapping]] = ..., replica_session_end: _Optional[_Union[ReplicaSessionEnd, _Mapping]] = ..., replica_round_launched: _Optional[_Union[ReplicaRoundLaunched, _Mapping]] = ..., bundle: _Optional[_Iterable[_Union[ExchangeResponse, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "drafter_id", "incarnation", "vocab_size", "tokenizer_hash", "methods", "feature_layout", "feature_fingerprint", "supports_shm", "feature_offsets", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_SHM_FIELD_NUMBER: _ClassVar[int]
    FEATURE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    drafter_id: str
    incarnation: str
    vocab_size: int
    tokenizer_hash: str
    methods: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftMethod]
    feature_layout: _common_pb2.FeatureLayout
    feature_fingerprint: str
    supports_shm: bool
    feature_offsets: bool
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., drafter_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, str]]] = ..., feature_layout: _Optional[_Union[_common_pb2.FeatureLayout, str]] = ..., feature_fingerprint: _Optional[str] = ..., supports_shm: bool = ..., feature_offsets: bool = ..., version: _Optional[str] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("columns", "digests", "tokens", "parents", "logprobs", "has_distribution", "distribution_lens", "distribution_token_ids", "distribution_counts", "draft_us")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_LENS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_COUNTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    columns: bytes
    digests: bytes
    tokens: bytes
    parents: bytes
    logprobs: bytes
    has_distribution: bytes
    distribution_lens: bytes
    distribution_token_ids: bytes
    distribution_counts: bytes
    draft_us: int
    def __init__(self, columns: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., has_distribution: _Optional[bytes] = ..., distribution_lens: _Optional[bytes] = ..., distribution_token_ids: _Optional[bytes] = ..., distribution_counts: _Optional[bytes] = ..., draft_us: _Optional[int] = ...) -> None: ...

class SessionsLost(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "verifier_id", "incarnation", "shm_offer", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHM_OFFER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    verifier_id: str
    incarnation: str
    shm_offer: ShmOffer
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., verifier_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., shm_offer: _Optional[_Union[ShmOffer, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class ShmOffer(_message.Message):
    __slots__ = ("name", "token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class ShmAnswer(_message.Message):
    __slots__ = ("joined",)
    JOINED_FIELD_NUMBER: _ClassVar[int]
    joined: bool
    def __init__(self, joined: bool = ...) -> None: ...

class SessionStart(_message.Message):
    __slots__ = ("session_id", "epoch", "plan", "sampling", "max_len", "prompt_len", "handle", "structured_output", "stop_token_ids", "traceparent", "token_limits")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LIMITS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    plan: _common_pb2.Plan
    sampling: _common_pb2.Sampling
    max_len: int
    prompt_len: int
    handle: int
    structured_output: _common_pb2.StructuredOutput
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    token_limits: _common_pb2.TokenLimits
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_len: _Optional[int] = ..., prompt_len: _Optional[int] = ..., handle: _Optional[int] = ..., structured_output: _Optional[_Union[_common_pb2.StructuredOutput, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., token_limits: _Optional[_Union[_common_pb2.TokenLimits, _Mapping]] = ...) -> None: ...

class Verdicts(_message.Message):
    __slots__ = ("columns", "digests", "tokens", "feature_dtype", "feature_width", "features", "feature_offsets")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    columns: bytes
    digests: bytes
    tokens: bytes
    feature_dtype: _common_pb2.TensorDtype
    feature_width: int
    features: bytes
    feature_offsets: bytes
    def __init__(self, columns: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., feature_dtype: _Optional[_Union[_common_pb2.TensorDtype, str]] = ..., feature_width: _Optional[int] = ..., features: _Optional[bytes] = ..., feature_offsets: _Optional[bytes] = ...) -> None: ...

class PlanChange(_message.Message):
    __slots__ = ("handle", "plan")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    handle: int
    plan: _common_pb2.Plan
    def __init__(self, handle: _Optional[int] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class ReplicaOffer(_message.Message):
    __slots__ = ("num_slots", "max_rows", "draft_length", "max_chunks", "chunk_tokens", "feature_size", "feature_dtype", "distribution_entries", "depth", "num_blocks", "block_tokens", "table_blocks", "vocab_size", "memory", "fan_out", "ahead_rows", "gpu")
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_SIZE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    num_slots: int
    max_rows: int
    draft_length: int
    max_chunks: int
    chunk_tokens: int
    feature_size: int
    feature_dtype: _common_pb2.TensorDtype
    distribution_entries: int
    depth: int
    num_blocks: int
    block_tokens: int
    table_blocks: int
    vocab_size: int
    memory: _common_pb2.MemoryKind
    fan_out: int
    ahead_rows: int
    gpu: str
    def __init__(self, num_slots: _Optional[int] = ..., max_rows: _Optional[int] = ..., draft_length: _Optional[int] = ..., max_chunks: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., feature_size: _Optional[int] = ..., feature_dtype: _Optional[_Union[_common_pb2.TensorDtype, str]] = ..., distribution_entries: _Optional[int] = ..., depth: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., table_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., memory: _Optional[_Union[_common_pb2.MemoryKind, str]] = ..., fan_out: _Optional[int] = ..., ahead_rows: _Optional[int] = ..., gpu: _Optional[str] = ...) -> None: ...

class ReplicaSessionBegin(_message.Message):
    __slots__ = ("slot", "blocks", "sampling", "num_rows", "prompt_ids", "output_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    blocks: bytes
    sampling: _common_pb2.Sampling
    num_rows: int
    prompt_ids: bytes
    output_ids: bytes
    def __init__(self, slot: _Optional[int] = ..., blocks: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., num_rows: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., output_ids: _Optional[bytes] = ...) -> None: ...

class ReplicaBlocksAdded(_message.Message):
    __slots__ = ("slot", "first", "blocks")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    first: int
    blocks: bytes
    def __init__(self, slot: _Optional[int] = ..., first: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...

class ReplicaSessionEnd(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class ReplicaRoundLaunched(_message.Message):
    __slots__ = ("rows", "chunks", "sampled", "ahead", "rejection")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    rows: int
    chunks: int
    sampled: bool
    ahead: bool
    rejection: bool
    def __init__(self, rows: _Optional[int] = ..., chunks: _Optional[int] = ..., sampled: bool = ..., ahead: bool = ..., rejection: bool = ...) -> None: ...

class ReplicaReady(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: _common_pb2.MemoryKind
    def __init__(self, memory: _Optional[_Union[_common_pb2.MemoryKind, str]] = ...) -> None: ...

class ReplicaRefused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
