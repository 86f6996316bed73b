"""Public inference API as dataclasses: requests and answers of clients and router.

A field that is None is not set, and the server's default applies. Any other value, including zero,
is used as given. Conversion to and from protobuf is in `outrider.wire.inference_codec` and
`outrider.wire.server_info_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.ids import DrafterId, RequestId, VerifierId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.spec.structured_output import StructuredOutput
from outrider.spec.tools import OutputParsing, ToolCall, ToolCallDelta, ToolOptions
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
"""Largest number of bad words. Each may have two tokenizations (see `SamplingOptions.bad_words`).
"""
MAX_BAD_WORD_BYTES = 256
MAX_NAME_BYTES = 256
MAX_ABORT_IDS = 4096
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a conversation. The model's chat template converts all of them to a prompt."""

    role: str
    """Role of the author: system, user, assistant or tool."""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of an assistant's message. Their arguments must be JSON objects."""
    tool_call_id: str = ""
    """Id of the call whose result a tool's message is; "" for other messages."""
    name: str = ""
    """Name of the tool whose result a tool's message is; may be ""."""
    reasoning: str = ""
    """Reasoning of an assistant's message, for templates that render it."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenized unchanged, without a chat template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are used unchanged."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, oldest message first. The chat template converts it to a prompt."""

    messages: tuple[ChatMessage, ...]
    tools: ToolOptions = field(default_factory=ToolOptions)
    """Tools that the model may call."""
    template_variables: str = ""
    """Variables of the chat template, as a JSON object; "" for none."""
    reasoning_effort: str | None = None
    """How much the model should think, for templates that know it: one of REASONING_EFFORTS. With
    "none", templates that can switch thinking off do so."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens between the tags of the reasoning, in [0, MAX_THINKING_TOKENS]. When
    they are used up, the model must end its reasoning. None does not limit it."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters of a request, with the ranges of `spec.sampling.SamplingParams`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """64-bit seed of the random numbers. The server chooses one if it is None."""
    rule: Rule | None = None
    """Acceptance rule at temperature > 0."""
    banned_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value that is added to its logit; ids are distinct."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only token ids that may be emitted, including end-of-turn ids; empty allows all ids."""
    bad_words: tuple[str, ...] = ()
    """Texts that are never emitted in their usual tokenization. A text has two of these: one for
    the start of a text and one for the position after a space.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingOptions:
    """Conditions that end generation."""

    max_tokens: int | None = None
    """Maximum number of tokens to emit."""
    default_max_tokens: int | None = None
    """Maximum number of tokens if `max_tokens` is None, reduced to the remaining context; None uses
    the router's default. Only the router sets this field, and it is not part of encoded requests.
    """
    min_tokens: int | None = None
    """Number of tokens that must be emitted before a stop token or stop string can end the answer.
    """
    stop: tuple[str, ...] = ()
    """Stop strings. The text ends before the first one that occurs, unless
    `include_stop_str_in_output` is true.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, in addition to the model's end-of-turn ids."""
    ignore_eos: bool | None = None
    """Whether generation continues after the model's end-of-turn ids."""
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string, or the text of the stop token, that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Speculation settings of a request. They change the speed, but never the distribution of the
    text.
    """

    enabled: bool | None = None
    """Whether speculation is used; False decodes without drafts."""
    method: DraftMethod | None = None
    draft_tokens: int | None = None
    """Number of draft tokens (tree nodes) in a round."""
    draft_top_k: int | None = None
    """Largest number of children of a node of the draft tree; 1 drafts a chain."""
    look_ahead: int | None = None
    """0 disables look-ahead: the drafter waits for each verdict (lock-step). 1 allows look-ahead,
    which the verifier's planner may still disable.
    """
    fan_out: int | None = None
    """Number of outcomes of a round for which drafts are made ahead; 0 lets the drafter choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Request to generate an answer to one prompt."""

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
    """Whether the request continues to run when its stream breaks, so that `ResumeStream` can
    resume the stream.
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
    """Number of characters of the text that have arrived. It is separate from `tokens`, because the
    text may lag behind the token ids. If both are 0, the stream begins with PromptInfo.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """First message of a stream. It says that the request was admitted."""

    request_id: RequestId
    prompt_tokens: int
    model: str
    prompt_token_ids: tuple[int, ...] = ()
    """Token ids of the prompt if the request has `return_prompt_token_ids`, else empty."""
    parsing: OutputParsing | None = None
    """How the answer is split; None if it is not split. Only the router sets it, and it is not
    encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Newly emitted text and token ids. The text may lag behind the ids by a few tokens: it is held
    back while its bytes do not form whole characters or could be the start of a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities, with one entry for each id of `token_ids` if the request has
    `top_logprobs`; otherwise empty.
    """
    reasoning: str = ""
    """Reasoning that precedes the answer; not part of `text`."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    """New parts of tool calls; not part of `text`."""
    characters: int = 0
    """Number of characters of the unparsed answer up to here, for `StreamPosition.characters`; 0 if
    `text` is the unparsed answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    """Number of tokens of the reasoning, its tags included; part of `completion_tokens`."""
    cached_tokens: int = 0
    """Number of prompt tokens whose KV the verifier took from its prefix cache when it first
    admitted the request; part of `prompt_tokens`. Preemptions and failovers do not change it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishInfo:
    """Last message of a stream that ended without an error. An error ends the stream with an RPC
    status instead.
    """

    reason: FinishReason
    usage: Usage
    stats: SpecStats
    stop_string: str | None = None
    """Stop string that ended the answer, or None."""
    stop_token_id: int | None = None
    """Stop token id that ended the answer, or None."""


StreamEvent = PromptInfo | Delta | FinishInfo
"""Message of a stream. A stream consists of one PromptInfo, any number of Delta, and one
FinishInfo.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """A complete answer."""

    request_id: RequestId
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishInfo
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities, with one entry for each id of `token_ids` if the request has
    `top_logprobs`; otherwise empty.
    """
    prompt_token_ids: tuple[int, ...] = ()
    """Token ids of the prompt if the request has `return_prompt_token_ids`, else empty."""
    reasoning: str = ""
    """Reasoning that precedes the answer; not part of `text`."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the answer; not part of `text`."""


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
    """Draft methods of the verifier's in-process drafter."""
    simulated_acceptance: str = ""
    """Rates at which drafts are accepted at random (benchmarks only); empty otherwise."""
    planner: str = ""
    """Text with the planner's decision for each workload class; empty if the planner decides
    nothing.
    """
    stats: SpecStats = field(default_factory=SpecStats)
    """Speculation counters of all sessions since the start."""
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
    device_exchange: DeviceExchangeInfo | None = None
    """State of the device exchange; None if it is off."""
    problem: str = ""
    """Why the router does not use the verifier, at most `MAX_PROBLEM_BYTES`; empty if it is healthy
    or was not polled yet.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLink:
    """A verifier's view of a drafter that is connected to it."""

    verifier_id: VerifierId
    sessions: int
    """Number of the verifier's sessions that the drafter drafts for."""
    answer_ms: float = 0.0
    """Recent mean time in milliseconds from the end of a round to the arrival of the drafter's
    proposals; 0 if unknown.
    """
    quarantine: str = ""
    """Reason why the drafter is quarantined for the verifier: slow, silent or wrong. Empty if it is
    not quarantined.
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
    """Artificial slow-down of the drafter in benchmarks; empty otherwise."""
    draining: bool = False
    """Whether the drafter is being removed."""
    links: tuple[DrafterLink, ...] = ()
    """One entry for each verifier that the drafter is connected to."""
    problem: str = ""
    """Why the router does not use the drafter, at most `MAX_PROBLEM_BYTES`; empty if it is healthy
    or the router knows no reason.
    """


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
