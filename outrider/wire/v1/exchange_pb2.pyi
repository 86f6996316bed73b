from outrider.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExchangeRequest(_message.Message):
    __slots__ = ("hello", "proposal", "heartbeat", "bundle")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    proposal: Proposal
    heartbeat: _common_pb2.Heartbeat
    bundle: _containers.RepeatedCompositeFieldContainer[ExchangeRequest]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., bundle: _Optional[_Iterable[_Union[ExchangeRequest, _Mapping]]] = ...) -> None: ...

class ExchangeResponse(_message.Message):
    __slots__ = ("welcome", "session_start", "verdict", "plan_change", "session_end", "heartbeat", "bundle")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SESSION_START_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PLAN_CHANGE_FIELD_NUMBER: _ClassVar[int]
    SESSION_END_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    session_start: SessionStart
    verdict: Verdict
    plan_change: PlanChange
    session_end: SessionEnd
    heartbeat: _common_pb2.Heartbeat
    bundle: _containers.RepeatedCompositeFieldContainer[ExchangeResponse]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., session_start: _Optional[_Union[SessionStart, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., plan_change: _Optional[_Union[PlanChange, _Mapping]] = ..., session_end: _Optional[_Union[SessionEnd, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., bundle: _Optional[_Iterable[_Union[ExchangeResponse, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "drafter_id", "incarnation", "vocab_size", "tokenizer_hash", "methods", "feature_layout", "feature_fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    drafter_id: str
    incarnation: str
    vocab_size: int
    tokenizer_hash: str
    methods: _containers.RepeatedScalarFieldContainer[_common_pb2.DraftMethod]
    feature_layout: _common_pb2.FeatureLayout
    feature_fingerprint: str
    def __init__(self, protocol_version: _Optional[int] = ..., drafter_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., methods: _Optional[_Iterable[_Union[_common_pb2.DraftMethod, str]]] = ..., feature_layout: _Optional[_Union[_common_pb2.FeatureLayout, str]] = ..., feature_fingerprint: _Optional[str] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("tokens", "parents", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    logprobs: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class DraftLaw(_message.Message):
    __slots__ = ("offsets", "ids", "counts")
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    offsets: bytes
    ids: bytes
    counts: bytes
    def __init__(self, offsets: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("session_id", "prefix_digest", "prefix_len", "tree", "law", "draft_us")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    prefix_digest: int
    prefix_len: int
    tree: DraftTree
    law: DraftLaw
    draft_us: int
    def __init__(self, session_id: _Optional[str] = ..., prefix_digest: _Optional[int] = ..., prefix_len: _Optional[int] = ..., tree: _Optional[_Union[DraftTree, _Mapping]] = ..., law: _Optional[_Union[DraftLaw, _Mapping]] = ..., draft_us: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "verifier_id", "incarnation")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    verifier_id: str
    incarnation: str
    def __init__(self, protocol_version: _Optional[int] = ..., verifier_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class SessionStart(_message.Message):
    __slots__ = ("session_id", "epoch", "plan", "sampling", "max_len", "prompt_len")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    plan: _common_pb2.Plan
    sampling: _common_pb2.Sampling
    max_len: int
    prompt_len: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_len: _Optional[int] = ..., prompt_len: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("session_id", "epoch", "round_id", "start", "tokens", "prefix_digest", "feature_start", "features", "draft_wanted", "accepted_nodes", "proposal_digest")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FEATURE_START_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WANTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round_id: int
    start: int
    tokens: bytes
    prefix_digest: int
    feature_start: int
    features: _common_pb2.Tensor
    draft_wanted: bool
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    proposal_digest: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round_id: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prefix_digest: _Optional[int] = ..., feature_start: _Optional[int] = ..., features: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., draft_wanted: bool = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., proposal_digest: _Optional[int] = ...) -> None: ...

class PlanChange(_message.Message):
    __slots__ = ("session_id", "plan")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    plan: _common_pb2.Plan
    def __init__(self, session_id: _Optional[str] = ..., plan: _Optional[_Union[_common_pb2.Plan, _Mapping]] = ...) -> None: ...

class SessionEnd(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...
