"""Public inference API as dataclasses: requests and answers of clients and router.

`None` everywhere means "not set: the server's default applies"; a set value, zero included, is used
as given. Conversion to and from protobuf is in `outrider.wire.inference_codec` and
`outrider.wire.server_info_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.structured_output import StructuredOutput
from outrider.wire.limits import MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS
from outrider.wire.logprobs import TokenLogprobs as TokenLogprobs
from outrider.wire.messages import DeviceExchangeInfo, FinishReason, SpecStats

MAX_PROMPT_TOKENS = 1 << 20
MAX_PROMPT_BYTES = 16 << 20
MAX_CHAT_MESSAGES = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORD_TEXTS = 128
"""Largest number of bad words. Each may have two sequences of token ids."""
MAX_BAD_WORD_BYTES = 256
MAX_NAME_BYTES = 256
MAX_ABORT_IDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation; the model's chat template renders it."""

    role: str
    """Role of the author: system, user or assistant."""
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenized as it stands, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are used as they stand."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest message first, rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters of a request; ranges are those of `spec.sampling.SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """64-bit seed of the noise; without one the server draws one."""
    rule: Rule | None = None
    """Acceptance rule at temperature > 0."""
    banned_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value that is added to its logit; ids are distinct."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only token ids that may be emitted, including end-of-turn ids; empty allows all ids."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never emitted in their usual tokenization, at the start of a text or after a
    space.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingOptions:
    """Conditions that end generation."""

    max_tokens: int | None = None
    """Maximum number of tokens to emit."""
    default_max_tokens: int | None = None
    """Maximum number of tokens if `max_tokens` is None, reduced to the remaining context; None uses
    the router's default. Only the router sets it, and it is not encoded.
    """
    min_tokens: int | None = None
    """Number of tokens before which neither a stop token nor a stop string ends the answer."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings; it is not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, in addition to the model's end-of-turn ids."""
    ignore_eos: bool | None = None
    """Whether generation continues after the model's end-of-turn ids."""
    include_stop_str_in_output: bool = False
    """Whether the stop string, or the text of the stop token, is part of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculation settings of a request; they change the speed and never the distribution of the
    text."""

    enabled: bool | None = None
    """Whether speculation is used; False decodes without drafts."""
    method: DraftMethod | None = None
    draft_tokens: int | None = None
    """Draft tokens (tree nodes) per round."""
    draft_top_k: int | None = None
    """Children per expanded node of the draft tree; 1 drafts a chain."""
    look_ahead: int | None = None
    """0 drafts in lock-step; 1 lets the verifier's planner draft ahead of the verdicts."""
    fan_out: int | None = None
    """Number of outcomes drafted ahead per round; 0 lets the drafter choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to be continued."""

    prompt: Prompt
    request_id: RequestId | None = None
    """Id of the request, unique among running requests; None lets the router generate one."""
    model: str | None = None
    """Name of a served model; None takes the only or default one."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stopping: StoppingOptions = field(default_factory=StoppingOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    priority: int = 0
    """Priority in [-MAX_PRIORITY, MAX_PRIORITY]. Higher priorities are served first and may preempt
    lower ones.
    """
    resumable: bool = False
    """Whether the request continues when its stream breaks, so that `ResumeStream` can resume the
    stream.
    """
    top_logprobs: int | None = None
    """Number of most probable token ids to return with each emitted token, in [0,
    MAX_TOP_LOGPROBS]. 0 returns only the emitted tokens' log-probabilities, None returns none.
    """
    structured_output: StructuredOutput | None = None
    """Grammar of the answer; None if unrestricted."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are omitted from the text; None means True."""
    return_prompt_token_ids: bool = False
    """Whether PromptInfo contains the token ids of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Position from which a stream is resumed."""

    request_id: RequestId
    tokens: int = 0
    """Number of token ids of the answer that have arrived."""
    characters: int = 0
    """Number of characters of the text that have arrived, which is counted separately because text
    may lag behind ids. With both counts 0 the stream begins with PromptInfo.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """First message of a stream: the request was admitted."""

    request_id: RequestId
    prompt_tokens: int
    model: str
    prompt_token_ids: tuple[int, ...] = ()
    """Token ids of the prompt if the request has `return_prompt_token_ids`, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly emitted text and ids. The text may lag behind the ids by a few tokens, because it waits
    until its bytes form whole characters and cannot be the start of a stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per id of `token_ids` if the request has `top_logprobs`, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInfo:
    """Last message of a stream that ended without an error; errors are RPC statuses."""

    reason: FinishReason
    usage: Usage
    stats: SpecStats
    stop_string: str | None = None
    """Stop string that ended the answer, or None."""
    stop_token_id: int | None = None
    """Stop token id that ended the answer, or None."""


StreamEvent = PromptInfo | Delta | FinishInfo
"""What a stream yields: one PromptInfo, any number of Delta, one FinishInfo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A complete answer."""

    request_id: RequestId
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishInfo
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per id of `token_ids` if the request has `top_logprobs`, else empty."""
    prompt_token_ids: tuple[int, ...] = ()
    """Token ids of the prompt if the request has `return_prompt_token_ids`, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A served model."""

    name: str
    vocab_size: int
    max_context_len: int
    tokenizer_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSummary:
    """A verifier as the router sees it."""

    verifier_id: VerifierId
    address: str
    healthy: bool
    model: str
    sessions: int
    max_sessions: int
    kv_free_blocks: int
    kv_total_blocks: int
    in_process_methods: tuple[DraftMethod, ...] = ()
    """Draft methods of in-process drafts."""
    simulated_acceptance: str = ""
    """Rates at which drafts are accepted at random (benchmarks only); empty otherwise."""
    planner: str = ""
    """Decisions of the planner by workload class; empty if it decides nothing."""
    stats: SpecStats = field(default_factory=SpecStats)
    """Speculation counters of all sessions since the start."""
    hit_idle_us_p50: float = 0.0
    """Median time in microseconds between the end of a round and the submission of a round in which
    all sessions have hits; 0 without such rounds."""
    draining: bool = False
    """Whether the verifier refuses new sessions because it is about to stop."""
    waiting_sessions: int = 0
    """Number of sessions without KV: preempted, or not started."""
    preemptions_swap: int = 0
    """Preemptions since the start whose KV was swapped to host memory."""
    preemptions_recompute: int = 0
    """Preemptions since the start whose KV was dropped for recomputation."""
    prefix_cache_query_tokens: int = 0
    """Tokens looked up in the prefix cache since the start."""
    prefix_cache_hit_tokens: int = 0
    """Tokens found in the prefix cache since the start."""
    device_exchange: DeviceExchangeInfo | None = None
    """Device exchange with a drafter; None if it is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLink:
    """A verifier's view of a drafter that is connected to it."""

    verifier_id: VerifierId
    sessions: int
    """Number of the verifier's sessions that the drafter drafts for."""
    answer_ms: float = 0.0
    """Recent mean time from the end of a round to the drafter's proposals in milliseconds; 0 if
    unknown.
    """
    quarantine: str = ""
    """Reason for which the drafter is quarantined for the verifier: slow, silent or wrong; empty if
    it is not.
    """
    probe_in_s: float = 0.0
    """Time in seconds until the quarantined drafter gets one session as a probe; 0 during the
    probe.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSummary:
    """A drafter as the router sees it."""

    drafter_id: DrafterId
    address: str
    healthy: bool
    methods: tuple[DraftMethod, ...]
    sessions: int
    handicap: str = ""
    """How benchmarks slow the drafter down; empty otherwise."""
    draining: bool = False
    """Whether the drafter is being removed."""
    links: tuple[DrafterLink, ...] = ()
    """One link per verifier that the drafter is connected to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """State of the router and its fleet."""

    version: str
    protocol_version: int
    queued: int
    queue_bound: int
    running: int
    verifiers: tuple[VerifierSummary, ...]
    drafters: tuple[DrafterSummary, ...]
