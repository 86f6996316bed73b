from outrider.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifierServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceGetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "verifier_id", "incarnation", "model_name", "vocab_size", "tokenizer_hash", "max_context_len", "kv_block_tokens", "kv_total_blocks", "kv_free_blocks", "sessions", "max_sessions", "drafters", "feature_fingerprint", "rounds_total", "tokens_total", "dtype", "round_ms_p50", "forward_ms_p50", "overhead_ms_p50", "in_process_methods", "in_process_draft_length", "simulated_acceptance", "planner", "stats", "hit_idle_us_p50", "draining", "waiting_sessions", "preemptions_swap", "preemptions_recompute", "prefix_cache_query_tokens", "prefix_cache_hit_tokens", "engine_steps", "device_exchange", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROUND_MS_P50_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_P50_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_MS_P50_FIELD_NUMBER: _ClassVar[int]
    IN_PROCESS_METHODS_FIELD_NUMBER: _ClassVar[int]
    IN_PROCESS_DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HIT_IDLE_US_P50_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_SWAP_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    verifier_id: str
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
    drafters: _containers.RepeatedCompositeFieldContainer[AttachedDrafter]
    feature_fingerprint: str
    rounds_total: int
    tokens_total: int
    dtype: str
    round_ms_p50: float
    forward_ms_p50: float
    overhead_ms_p50: float
    in_process_methods: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftMethod]
    in_process_draft_length: int
    simulated_acceptance: str
    planner: str
    stats: _common_pb2.SpecDecodeStats
    hit_idle_us_p50: float
    draining: bool
    waiting_sessions: int
    preemptions_swap: int
    preemptions_recompute: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    engine_steps: int
    device_exchange: _common_pb2.DeviceExchangeInfo
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., verifier_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., max_context_len: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., kv_total_blocks: _Optional[int] = ..., kv_free_blocks: _Optional[int] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[AttachedDrafter, _Mapping]]] = ..., feature_fingerprint: _Optional[str] = ..., rounds_total: _Optional[int] = ..., tokens_total: _Optional[int] = ..., dtype: _Optional[str] = ..., round_ms_p50: _Optional[float] = ..., forward_ms_p50: _Optional[float] = ..., overhead_ms_p50: _Optional[float] = ..., in_process_methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, str]]] = ..., in_process_draft_length: _Optional[int] = ..., simulated_acceptance: _Optional[str] = ..., planner: _Optional[str] = ..., stats: _Optional[_Union[_common_pb2.SpecDecodeStats, _Mapping]] = ..., hit_idle_us_p50: _Optional[float] = ..., draining: bool = ..., waiting_sessions: _Optional[int] = ..., preemptions_swap: _Optional[int] = ..., preemptions_recompute: _Optional[int] = ..., prefix_cache_query_tokens: _Optional[int] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., engine_steps: _Optional[int] = ..., device_exchange: _Optional[_Union[_common_pb2.DeviceExchangeInfo, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class AttachedDrafter(_message.Message):
    __slots__ = ("drafter_id", "incarnation", "methods", "sessions", "answer_ms", "same_host", "answers", "proposal_timeouts", "invalid", "silent_ms")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_MS_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    INVALID_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    incarnation: str
    methods: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftMethod]
    sessions: int
    answer_ms: float
    same_host: bool
    answers: int
    proposal_timeouts: int
    invalid: int
    silent_ms: float
    def __init__(self, drafter_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, str]]] = ..., sessions: _Optional[int] = ..., answer_ms: _Optional[float] = ..., same_host: bool = ..., answers: _Optional[int] = ..., proposal_timeouts: _Optional[int] = ..., invalid: _Optional[int] = ..., silent_ms: _Optional[float] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("max_tokens", "open_tag", "open_ids", "close_tag", "close_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_TAG_FIELD_NUMBER: _ClassVar[int]
    OPEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_TAG_FIELD_NUMBER: _ClassVar[int]
    CLOSE_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    open_tag: str
    open_ids: _containers.RepeatedScalarFieldContainer[int]
    close_tag: str
    close_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., open_tag: _Optional[str] = ..., open_ids: _Optional[_Iterable[int]] = ..., close_tag: _Optional[str] = ..., close_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionSpec(_message.Message):
    __slots__ = ("session_id", "epoch", "token_ids", "prompt_len", "max_new_tokens", "stop_token_ids", "min_new_tokens", "sampling", "plan", "drafter_id", "priority", "top_logprobs", "structured_output", "traceparent", "token_limits", "thinking_budget")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LIMITS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_new_tokens: int
    sampling: _common_pb2.Sampling
    plan: _common_pb2.Plan
    drafter_id: str
    priority: int
    top_logprobs: int
    structured_output: _common_pb2.StructuredOutput
    traceparent: str
    token_limits: _common_pb2.TokenLimits
    thinking_budget: ThinkingBudget
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ..., drafter_id: _Optional[str] = ..., priority: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[_common_pb2.StructuredOutput, _Mapping]] = ..., traceparent: _Optional[str] = ..., token_limits: _Optional[_Union[_common_pb2.TokenLimits, _Mapping]] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class SessionsRequest(_message.Message):
    __slots__ = ("open", "leave", "heartbeat", "move")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    leave: SessionLeave
    heartbeat: _common_pb2.Heartbeat
    move: SessionMove
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., leave: _Optional[_Union[SessionLeave, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., move: _Optional[_Union[SessionMove, _Mapping]] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("handle", "spec")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    handle: int
    spec: SessionSpec
    def __init__(self, handle: _Optional[int] = ..., spec: _Optional[_Union[SessionSpec, _Mapping]] = ...) -> None: ...

class SessionLeave(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class SessionMove(_message.Message):
    __slots__ = ("handle", "drafter_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    drafter_id: str
    def __init__(self, handle: _Optional[int] = ..., drafter_id: _Optional[str] = ...) -> None: ...

class SessionsResponse(_message.Message):
    __slots__ = ("events", "failure", "heartbeat", "moved", "draining")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    events: SessionEvents
    failure: SessionFailure
    heartbeat: _common_pb2.Heartbeat
    moved: SessionMoved
    draining: SessionsDraining
    def __init__(self, events: _Optional[_Union[SessionEvents, _Mapping]] = ..., failure: _Optional[_Union[SessionFailure, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., moved: _Optional[_Union[SessionMoved, _Mapping]] = ..., draining: _Optional[_Union[SessionsDraining, _Mapping]] = ...) -> None: ...

class SessionsDraining(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class SessionMoved(_message.Message):
    __slots__ = ("handle", "drafter_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    drafter_id: str
    def __init__(self, handle: _Optional[int] = ..., drafter_id: _Optional[str] = ...) -> None: ...

class SessionEvents(_message.Message):
    __slots__ = ("handles", "round_ids", "counts", "tokens", "finish_reasons", "flags", "proposed", "accepted", "logprob_widths", "logprobs", "top_ids", "cached_tokens")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ROUND_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_WIDTHS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    round_ids: bytes
    counts: bytes
    tokens: bytes
    finish_reasons: bytes
    flags: bytes
    proposed: bytes
    accepted: bytes
    logprob_widths: bytes
    logprobs: bytes
    top_ids: bytes
    cached_tokens: bytes
    def __init__(self, handles: _Optional[bytes] = ..., round_ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., finish_reasons: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., proposed: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., logprob_widths: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., cached_tokens: _Optional[bytes] = ...) -> None: ...

class SessionFailure(_message.Message):
    __slots__ = ("handle", "code", "kind", "message", "reason", "retry_after_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: str
    kind: str
    message: str
    reason: str
    retry_after_s: float
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[str] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class SetPlanRequest(_message.Message):
    __slots__ = ("session_id", "plan")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan: _common_pb2.Plan
    def __init__(self, session_id: _Optional[str] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ...) -> None: ...

class SetPlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceGetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrafterServiceGetInfoResponse(_message.Message):
    __slots__ = ("protocol_version", "drafter_id", "incarnation", "vocab_size", "tokenizer_hash", "methods", "feature_layout", "feature_fingerprint", "sessions", "verifiers", "draft_ms_p50", "handicap", "draining", "max_sessions", "version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_P50_FIELD_NUMBER: _ClassVar[int]
    HANDICAP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    drafter_id: str
    incarnation: str
    vocab_size: int
    tokenizer_hash: str
    methods: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftMethod]
    feature_layout: _common_pb2.FeatureLayout
    feature_fingerprint: str
    sessions: int
    verifiers: _containers.RepeatedScalarFieldContainer[str]
    draft_ms_p50: float
    handicap: str
    draining: bool
    max_sessions: int
    version: str
    def __init__(self, protocol_version: _Optional[int] = ..., drafter_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, str]]] = ..., feature_layout: _Optional[_Union[_common_pb2.FeatureLayout, str]] = ..., feature_fingerprint: _Optional[str] = ..., sessions: _Optional[int] = ..., verifiers: _Optional[_Iterable[str]] = ..., draft_ms_p50: _Optional[float] = ..., handicap: _Optional[str] = ..., draining: bool = ..., max_sessions: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("verifier_address",)
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    verifier_address: str
    def __init__(self, verifier_address: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("verifier_address",)
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    verifier_address: str
    def __init__(self, verifier_address: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
