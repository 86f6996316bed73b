"""Pydantic models of HTTP request bodies, with the field names of OpenAI and vLLM.

Types are strict ("5" is not a number). Unknown fields are ignored, as clients of many servers
expect, except for those in `outrider_router.api.http.unsupported_fields`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Len
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic.fields import FieldInfo

from outrider.spec.plan import MAX_DRAFT_TOKENS, MAX_DRAFT_TOP_K, MAX_FAN_OUT, MAX_LOOK_AHEAD
from outrider.spec.sampling import (
    MAX_BANNED_IDS,
    MAX_BIAS,
    MAX_BIASED_IDS,
    MAX_TEMPERATURE,
    MIN_SEED,
    UINT64_MAX,
)
from outrider.spec.thinking_budget import MAX_THINKING_TOKENS
from outrider.spec.token_limits import MAX_ALLOWED_IDS
from outrider.spec.tools import MAX_TOOL_CALLS, MAX_TOOLS
from outrider.wire.inference import (
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORD_TEXTS,
    MAX_CHAT_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from outrider.wire.limits import MAX_PRIORITY, MAX_SEQUENCE_LEN, MAX_VOCAB_SIZE
from outrider_router.api.http.structured_outputs import StrictModel, StructuredOutputFields
from outrider_router.api.http.validation_errors import UNION_TAG

MAX_CHOICES = 128
"""Largest number of choices of one HTTP request: number of prompts times n."""
MAX_TOKENIZED_CHARS = 1 << 19
"""Largest number of characters in a request of /tokenize, summed over all messages."""
MAX_DETOKENIZED_IDS = 1 << 17
"""Largest number of token ids in a request of /detokenize."""
MAX_TIMEOUT_S = 7 * 86400.0
"""Largest timeout in seconds: a week."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens in completions."""


def list_size(low: int, high: int) -> FieldInfo:
    """Return the size limits of a list that reports only its first invalid entry."""
    info: FieldInfo = Field(min_length=low, max_length=high, fail_fast=True)
    return info


def few_entries(value: object, most: int = MAX_BIASED_IDS) -> object:
    """Refuse an object with more than `most` entries before pydantic validates each entry."""
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"must have at most {most} entries, has {len(value)}")
    return value


def _few_bytes(text: str, most: int = MAX_STOP_STRING_BYTES) -> str:
    """Refuse a string that has more than `most` bytes in UTF-8, because the gRPC API limits bytes
    too.
    """
    size = len(text.encode())
    if size > most:
        raise ValueError(f"must have at most {most} bytes of UTF-8, has {size}")
    return text


TokenIdNumber = Annotated[int, Ge(0), Le(MAX_VOCAB_SIZE - 1)]
Text = Annotated[str, Len(1, MAX_PROMPT_BYTES)]
TokenIds = Annotated[list[TokenIdNumber], list_size(1, MAX_PROMPT_TOKENS)]
StopString = Annotated[str, Len(1, MAX_STOP_STRING_BYTES), AfterValidator(_few_bytes)]
BadWord = Annotated[
    str,
    Len(1, MAX_BAD_WORD_BYTES),
    AfterValidator(partial(_few_bytes, most=MAX_BAD_WORD_BYTES)),
]
ModelOrUserName = Annotated[str, Len(1, MAX_NAME_BYTES)]


def _prompt_kind(value: object) -> str:
    """Return the type of a prompt by its first item, so that a list of a million ids is validated
    only once.
    """
    if not isinstance(value, list):
        return f"{UNION_TAG}text"
    first = value[0] if value else 0
    if isinstance(first, str):
        return f"{UNION_TAG}texts"
    return f"{UNION_TAG}lists" if isinstance(first, list) else f"{UNION_TAG}tokens"


Prompts = Annotated[
    Annotated[Text, Tag(f"{UNION_TAG}text")]
    | Annotated[
        Annotated[list[Text], list_size(1, MAX_CHOICES)],
        Tag(f"{UNION_TAG}texts"),
    ]
    | Annotated[TokenIds, Tag(f"{UNION_TAG}tokens")]
    | Annotated[
        Annotated[list[TokenIds], list_size(1, MAX_CHOICES)],
        Tag(f"{UNION_TAG}lists"),
    ],
    Discriminator(_prompt_kind),
]


def text_or_list(value: object) -> str:
    """Return the tag of the member of a union of a string and a list."""
    return f"{UNION_TAG}list" if isinstance(value, list) else f"{UNION_TAG}text"


StopValue = Annotated[
    Annotated[StopString, Tag(f"{UNION_TAG}text")]
    | Annotated[
        Annotated[list[StopString], list_size(0, MAX_STOP_STRINGS)],
        Tag(f"{UNION_TAG}list"),
    ],
    Discriminator(text_or_list),
]


class StreamOptions(StrictModel):
    """Options of the token counts in a stream."""

    include_usage: bool | None = Field(
        default=None, description="Whether a last chunk with `usage` is added to the stream."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="Whether every chunk has `usage`."
    )


class GenerationOptions(StrictModel):
    """Fields that all generation requests share."""

    model: ModelOrUserName | None = Field(
        default=None,
        description="Name of a served model. May be omitted if only one model is served.",
    )
    stream: bool | None = None
    temperature: Annotated[float, Ge(0), Le(MAX_TEMPERATURE)] | None = Field(
        default=None, description="Sampling temperature. 0 decodes greedily. The default is 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Ge(-1), Le(MAX_VOCAB_SIZE)] | None = Field(
        default=None,
        description="Number of most probable token ids to keep. -1 and 0 keep all ids.",
    )
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    presence_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    frequency_penalty: Annotated[float, Ge(-2), Le(2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,8}$")],
                Annotated[float, Ge(-MAX_BIAS), Le(MAX_BIAS)],
            ],
            Len(0, MAX_BIASED_IDS),
            BeforeValidator(few_entries),
        ]
        | None
    ) = Field(
        default=None,
        description="Amounts that are added to logits. Each key is a token id, as a string.",
    )
    seed: Annotated[int, Ge(MIN_SEED), Le(UINT64_MAX)] | None = Field(
        default=None, description="Sampling seed of 64 bits. 2^64 is added to a negative seed."
    )
    stop: StopValue | None = None
    min_tokens: Annotated[int, Ge(0), Le(MAX_SEQUENCE_LEN)] | None = None
    stop_token_ids: Annotated[list[TokenIdNumber], list_size(0, MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    banned_token_ids: Annotated[list[TokenIdNumber], list_size(0, MAX_BANNED_IDS)] | None = None
    allowed_token_ids: Annotated[list[TokenIdNumber], list_size(1, MAX_ALLOWED_IDS)] | None = Field(
        default=None,
        description="The only token ids that may be generated. An end-of-turn id must be in "
        "the list to be generated.",
    )
    bad_words: Annotated[list[BadWord], list_size(0, MAX_BAD_WORD_TEXTS)] | None = Field(
        default=None,
        description="Words that are not generated. A word stands for the token sequences that the "
        "tokenizer makes of it, both alone and after a space.",
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Whether the stop string or stop token is part of the text."
    )
    skip_special_tokens: bool | None = Field(
        default=None,
        description="Whether special tokens are left out of the text. The default is true.",
    )
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = Field(
        default=None,
        description="Requests with a greater priority go first. (In vLLM, smaller goes first.)",
    )
    rule: Literal["greedy", "coupled", "rejection", "target-only"] | None = Field(
        default=None, description="Acceptance rule at temperature > 0. The default is `coupled`."
    )
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = Field(
        default=None, description="Time in seconds after which the request ends with status 504."
    )
    speculate: bool | None = Field(
        default=None, description="Whether speculative decoding is used."
    )
    drafter: Literal["none", "eagle3", "eagle", "ngram", "model"] | None = None
    draft_tokens: Annotated[int, Ge(0), Le(MAX_DRAFT_TOKENS)] | None = None
    draft_top_k: Annotated[int, Ge(1), Le(MAX_DRAFT_TOP_K)] | None = None
    look_ahead: Annotated[int, Ge(0), Le(MAX_LOOK_AHEAD)] | None = None
    fan_out: Annotated[int, Ge(0), Le(MAX_FAN_OUT)] | None = None


class GenerationRequest(GenerationOptions, StructuredOutputFields):
    """Fields that completions and chat requests share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] | None = Field(
        default=None, description="Number of choices per prompt. Choice i has the seed `seed + i`."
    )
    max_tokens: Annotated[int, Ge(1), Le(MAX_SEQUENCE_LEN)] | None = None
    return_token_ids: bool | None = Field(
        default=None, description="Whether the response has the token ids of prompt and answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Whether tokens of `logprobs` are written as `token_id:N`."
    )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Number of most probable tokens to return per position. 0 returns only the log-"
        "probability of the generated token.",
    )
    echo: bool | None = Field(
        default=None,
        description="Whether the text begins with the prompt. Not allowed with `logprobs`.",
    )


class TextPart(StrictModel):
    """A text part of a message."""

    type: Literal["text"]
    text: Annotated[str, Len(0, MAX_PROMPT_BYTES)]


class FunctionCall(StrictModel):
    """Function of a tool call in a conversation."""

    name: ModelOrUserName
    arguments: Annotated[str, Len(0, MAX_PROMPT_BYTES)] = Field(
        default="{}", description="Arguments as the text of a JSON object."
    )


class MessageToolCall(StrictModel):
    """Tool call of an assistant's message."""

    id: Annotated[str, Len(0, MAX_NAME_BYTES)] = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatRequestMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[Annotated[str, Len(0, MAX_PROMPT_BYTES)], Tag(f"{UNION_TAG}text")]
            | Annotated[
                Annotated[list[TextPart], list_size(1, 1024)],
                Tag(f"{UNION_TAG}list"),
            ],
            Discriminator(text_or_list),
        ]
        | None
    ) = Field(
        default=None, description="Text. May be null only in messages of the assistant with calls."
    )
    tool_calls: Annotated[list[MessageToolCall], list_size(0, MAX_TOOL_CALLS)] | None = Field(
        default=None, description="Tool calls that the assistant made."
    )
    tool_call_id: Annotated[str, Len(0, MAX_NAME_BYTES)] | None = Field(
        default=None, description="Id of the call whose result a message of the role tool is."
    )
    name: Annotated[str, Len(0, MAX_NAME_BYTES)] | None = Field(
        default=None, description="Name of the tool whose result a message is."
    )
    reasoning_content: Annotated[str, Len(0, MAX_PROMPT_BYTES)] | None = Field(
        default=None, description="Reasoning of the assistant, for templates that render it."
    )
    reasoning: Annotated[str, Len(0, MAX_PROMPT_BYTES)] | None = Field(
        default=None, description="Other name of `reasoning_content`."
    )


class FunctionDefinition(StrictModel):
    """Function that the model may call."""

    name: str = Field(description="1 to 64 letters, digits, underscores and dashes.")
    description: Annotated[str, Len(0, MAX_PROMPT_BYTES)] | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments, which are an object."
    )
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """Tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    """Name of a function."""

    name: str


class NamedToolChoice(StrictModel):
    """Choice of the tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice_kind(value: object) -> str:
    return f"{UNION_TAG}text" if isinstance(value, str) else f"{UNION_TAG}object"


ToolChoiceValue = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"{UNION_TAG}text")]
    | Annotated[NamedToolChoice, Tag(f"{UNION_TAG}object")],
    Discriminator(_choice_kind),
]
ToolDefinitions = Annotated[list[ToolDefinition], list_size(0, MAX_TOOLS)]


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatRequestMessage], list_size(1, MAX_CHAT_MESSAGES)]
    max_completion_tokens: Annotated[int, Ge(1), Le(MAX_SEQUENCE_LEN)] | None = Field(
        default=None, description="Largest number of generated tokens. Overrides `max_tokens`."
    )
    tools: ToolDefinitions | None = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: ToolChoiceValue | None = Field(
        default=None,
        description="none, auto, required or a named function. The default is auto. required and a "
        "named function are enforced by a grammar.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may have several calls. The default is true."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None,
        description="How much the model should think, for chat templates that know it. With none, "
        "templates that can switch thinking off do so.",
    )
    thinking_token_budget: Annotated[int, Ge(0), Le(MAX_THINKING_TOKENS)] | None = Field(
        default=None,
        description="Largest number of tokens of reasoning. When they are used up, the model must "
        "end its reasoning.",
    )
    include_reasoning: bool | None = Field(
        default=None, description="Whether the reasoning is returned. The default is true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as `enable_thinking`."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Number of most probable tokens to return per position. Needs `logprobs`.",
    )


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize, with exactly one of `prompt` and `messages`."""

    model: ModelOrUserName | None = None
    prompt: Annotated[str, Len(0, MAX_TOKENIZED_CHARS)] | None = None
    messages: Annotated[list[ChatRequestMessage], list_size(1, MAX_CHAT_MESSAGES)] | None = None
    add_special_tokens: bool | None = Field(
        default=None,
        description="Whether a BOS token is put before `prompt`. The default is true. Must not be "
        "true with `messages`, where the chat template writes the BOS token.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether the header of the next assistant message is added after `messages`. "
        "The default is true, unless `continue_final_message` is true.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Whether the last message is left open, so that the model continues it. Must "
        "not be true together with `add_generation_prompt`.",
    )
    tools: ToolDefinitions | None = Field(
        default=None, description="Functions that the chat template writes into the prompt."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as `enable_thinking`."
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: ModelOrUserName | None = None
    tokens: Annotated[list[TokenIdNumber], list_size(0, MAX_DETOKENIZED_IDS)]
