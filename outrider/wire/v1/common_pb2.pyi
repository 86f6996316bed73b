from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_GREEDY: _ClassVar[Rule]
    RULE_COUPLED: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]
    RULE_TARGET_ONLY: _ClassVar[Rule]

class DraftMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_METHOD_UNSPECIFIED: _ClassVar[DraftMethod]
    DRAFT_METHOD_NONE: _ClassVar[DraftMethod]
    DRAFT_METHOD_EAGLE3: _ClassVar[DraftMethod]
    DRAFT_METHOD_EAGLE: _ClassVar[DraftMethod]
    DRAFT_METHOD_NGRAM: _ClassVar[DraftMethod]
    DRAFT_METHOD_MODEL: _ClassVar[DraftMethod]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class FeatureLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_LAYOUT_UNSPECIFIED: _ClassVar[FeatureLayout]
    FEATURE_LAYOUT_NONE: _ClassVar[FeatureLayout]
    FEATURE_LAYOUT_PROJECTED: _ClassVar[FeatureLayout]

class TensorDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_DTYPE_UNSPECIFIED: _ClassVar[TensorDtype]
    TENSOR_DTYPE_FLOAT32: _ClassVar[TensorDtype]
    TENSOR_DTYPE_FLOAT16: _ClassVar[TensorDtype]
    TENSOR_DTYPE_BFLOAT16: _ClassVar[TensorDtype]
    TENSOR_DTYPE_INT32: _ClassVar[TensorDtype]
    TENSOR_DTYPE_INT64: _ClassVar[TensorDtype]
    TENSOR_DTYPE_UINT16: _ClassVar[TensorDtype]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_DEVICE: _ClassVar[MemoryKind]
    MEMORY_KIND_HOST: _ClassVar[MemoryKind]
RULE_UNSPECIFIED: Rule
RULE_GREEDY: Rule
RULE_COUPLED: Rule
RULE_REJECTION: Rule
RULE_TARGET_ONLY: Rule
DRAFT_METHOD_UNSPECIFIED: DraftMethod
DRAFT_METHOD_NONE: DraftMethod
DRAFT_METHOD_EAGLE3: DraftMethod
DRAFT_METHOD_EAGLE: DraftMethod
DRAFT_METHOD_NGRAM: DraftMethod
DRAFT_METHOD_MODEL: DraftMethod
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FEATURE_LAYOUT_UNSPECIFIED: FeatureLayout
FEATURE_LAYOUT_NONE: FeatureLayout
FEATURE_LAYOUT_PROJECTED: FeatureLayout
TENSOR_DTYPE_UNSPECIFIED: TensorDtype
TENSOR_DTYPE_FLOAT32: TensorDtype
TENSOR_DTYPE_FLOAT16: TensorDtype
TENSOR_DTYPE_BFLOAT16: TensorDtype
TENSOR_DTYPE_INT32: TensorDtype
TENSOR_DTYPE_INT64: TensorDtype
TENSOR_DTYPE_UINT16: TensorDtype
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_DEVICE: MemoryKind
MEMORY_KIND_HOST: MemoryKind

class LogitBias(_message.Message):
    __slots__ = ("id", "amount")
    ID_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    id: int
    amount: float
    def __init__(self, id: _Optional[int] = ..., amount: _Optional[float] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLimits(_message.Message):
    __slots__ = ("allowed_ids", "bad_words")
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    allowed_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, allowed_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "banned_ids", "seed", "rule", "logit_bias", "draft_key")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    banned_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    rule: Rule
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    draft_key: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., banned_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., draft_key: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("method", "draft_tokens", "top_k", "depth", "look_ahead", "fan_out", "proposal_timeout_ms")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_FIELD_NUMBER: _ClassVar[int]
    FAN_OUT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    method: DraftMethod
    draft_tokens: int
    top_k: int
    depth: int
    look_ahead: int
    fan_out: int
    proposal_timeout_ms: int
    def __init__(self, method: _Optional[_Union[DraftMethod, str]] = ..., draft_tokens: _Optional[int] = ..., top_k: _Optional[int] = ..., depth: _Optional[int] = ..., look_ahead: _Optional[int] = ..., fan_out: _Optional[int] = ..., proposal_timeout_ms: _Optional[int] = ...) -> None: ...

class SpecDecodeStats(_message.Message):
    __slots__ = ("rounds", "emitted", "proposed", "accepted", "fallback_rounds", "target_only_rounds", "accepted_per_depth", "mean_emitted_per_round", "paused_rounds", "decision", "look_ahead_rounds", "hit_rounds", "hit_accepted", "fresh_rounds", "fresh_accepted", "drafted_rounds")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_ONLY_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MEAN_EMITTED_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    PAUSED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    LOOK_AHEAD_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HIT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    HIT_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FRESH_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FRESH_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    emitted: int
    proposed: int
    accepted: int
    fallback_rounds: int
    target_only_rounds: int
    accepted_per_depth: _containers.RepeatedScalarFieldContainer[int]
    mean_emitted_per_round: float
    paused_rounds: int
    decision: str
    look_ahead_rounds: int
    hit_rounds: int
    hit_accepted: int
    fresh_rounds: int
    fresh_accepted: int
    drafted_rounds: int
    def __init__(self, rounds: _Optional[int] = ..., emitted: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., fallback_rounds: _Optional[int] = ..., target_only_rounds: _Optional[int] = ..., accepted_per_depth: _Optional[_Iterable[int]] = ..., mean_emitted_per_round: _Optional[float] = ..., paused_rounds: _Optional[int] = ..., decision: _Optional[str] = ..., look_ahead_rounds: _Optional[int] = ..., hit_rounds: _Optional[int] = ..., hit_accepted: _Optional[int] = ..., fresh_rounds: _Optional[int] = ..., fresh_accepted: _Optional[int] = ..., drafted_rounds: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class DeviceExchangeInfo(_message.Message):
    __slots__ = ("drafter_id", "memory", "draft_length", "idle_us_p50", "idle_rows")
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IDLE_US_P50_FIELD_NUMBER: _ClassVar[int]
    IDLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    drafter_id: str
    memory: MemoryKind
    draft_length: int
    idle_us_p50: float
    idle_rows: int
    def __init__(self, drafter_id: _Optional[str] = ..., memory: _Optional[_Union[MemoryKind, str]] = ..., draft_length: _Optional[int] = ..., idle_us_p50: _Optional[float] = ..., idle_rows: _Optional[int] = ...) -> None: ...
