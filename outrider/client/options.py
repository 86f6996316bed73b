"""Request options of the client: `GenerateOptions`, and their translation into a request."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final, TypedDict, TypeVar

from outrider.client.arguments import invalid_argument, is_text
from outrider.client.tools import choose_tools, make_tools
from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import MIN_SEED, UINT64_MAX, Rule
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.tools import Tool, with_object_arguments
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    GenerateResult,
    Prompt,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)

_GENERATED_ID: Final = re.compile(r"req-[0-9a-f]{24}")
PromptLike = str | Sequence[int] | Sequence[ChatMessage] | Prompt
"""Prompt of a request: a text, a sequence of token ids, a conversation, or a `Prompt`."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation request. The server chooses options that are left out."""

    max_tokens: int
    """Maximum number of tokens to emit."""
    min_tokens: int
    """Number of tokens that must be emitted before a stop token or a stop string can end the
    answer."""
    stop: Sequence[str]
    """Stop strings. The text ends before the first occurrence of any of them."""
    stop_token_ids: Sequence[int]
    """Token ids that end the answer, in addition to the model's end-of-turn ids."""
    ignore_eos: bool
    """Whether the answer continues after the model's end-of-turn ids."""
    include_stop_str_in_output: bool
    """Whether the text includes the stop string, or the text of the stop token, that ended the
    answer."""
    skip_special_tokens: bool
    """Whether special tokens are left out of the text."""
    temperature: float
    """Sampling temperature; 0 decodes greedily."""
    top_p: float
    """Nucleus sampling: only the most probable tokens with this total probability are sampled, in
    (0, 1]."""
    top_k: int
    """Number of most probable tokens that can be sampled; 0 means all."""
    min_p: float
    """Minimum probability of a sampled token, as a fraction of the highest probability, in [0,
    1]."""
    repetition_penalty: float
    """Factor by which tokens that occur in the prompt or the answer are penalized; 1 means no
    penalty."""
    presence_penalty: float
    """Amount subtracted from the logit of each token that the answer contains."""
    frequency_penalty: float
    """Amount subtracted from a token's logit for each of its occurrences in the answer."""
    seed: int
    """64-bit seed; a negative value stands for itself plus 2^64. The same seed gives the same text.
    With the rules rejection and target-only, the text also depends on the drafts."""
    rule: Rule | str
    """Acceptance rule at temperature > 0: coupled, rejection, target-only or greedy."""
    banned_token_ids: Sequence[int]
    """Token ids that are never emitted."""
    logit_bias: Mapping[int, float]
    """Map from token ids to values in [-100, 100] that are added to their logits."""
    allowed_token_ids: Sequence[int]
    """The only token ids that may be emitted; at least one. End-of-turn ids must be included if the
    answer is to end with them."""
    bad_words: Sequence[str]
    """Words that are never emitted. For each word, the tokenizer's token sequences of the word
    alone and after a space are banned; other spellings of the same text are not."""
    json_schema: Mapping[str, Any] | str
    """JSON schema that the answer must match. At most one of json_schema, json_object, regex and
    grammar may be given."""
    json_object: bool
    """Whether the answer must be a JSON object."""
    regex: str
    """Regular expression that the whole answer must match."""
    grammar: str
    """Context-free grammar that the answer must match, in Lark's syntax."""
    tools: Sequence[Tool | Mapping[str, Any]]
    """Tools that the model may call, as `Tool`s or in the form of OpenAI's API. This and the other
    options of tools, of reasoning and of the chat template need a conversation."""
    tool_choice: str
    """Whether the model must call tools: auto (default), none, required, or the name of the tool
    that must be called. required and a name are enforced by a grammar."""
    parallel_tool_calls: bool
    """Whether an answer may have several calls; default True."""
    reasoning_effort: str
    """How much the model should think, for chat templates that know it: none, minimal, low, medium,
    high or xhigh. With none, templates that can switch thinking off do so."""
    thinking_token_budget: int
    """Largest number of tokens of reasoning. When they are used up, the model must end its
    reasoning and begin the answer."""
    chat_template_kwargs: Mapping[str, Any]
    """Further variables of the chat template, of JSON's types."""
    speculate: bool
    """Whether to use speculative decoding."""
    drafter: DraftMethod | str
    """Draft method: eagle3, eagle, ngram, model or none."""
    draft_tokens: int
    """Maximum number of draft tokens in a round, which are the nodes of the draft tree."""
    draft_top_k: int
    """Branching factor: maximum number of children of a node of the draft tree; 1 drafts a
    chain."""
    look_ahead: int
    """1 allows look-ahead (drafting before the verdict that the draft continues), which the
    verifier's planner uses if it expects a gain; 0 never uses it."""
    fan_out: int
    """Number of outcomes of a round for which look-ahead makes drafts, at most 64; 0 lets the
    drafter choose."""
    top_logprobs: int
    """Number of most probable tokens, in [0, 20], whose log-probabilities are returned at each
    position, in addition to that of the emitted token; 0 returns only the latter."""
    return_prompt_token_ids: bool
    """Whether the answer, or the first message of a stream, contains the token ids of the
    prompt."""
    model: str
    """Name of a served model."""
    request_id: str
    """Id of the request, for example for `abort`. It must be unique among running requests."""
    priority: int
    """Priority in [-100, 100]; default 0. Requests of higher priority are served first and may
    preempt others."""
    resume: bool
    """Whether the request continues after a lost connection, which the client replaces, and after a
    restart of a router with a journal. Default True. If False, the request ends with its
    connection."""


EnumT = TypeVar("EnumT", bound=StrEnum)
FlagT = TypeVar("FlagT", bound=bool | None)

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_CHAT = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "thinking_token_budget",
    "chat_template_kwargs",
)


def user(content: str) -> ChatMessage:
    """Return a message of the user."""
    return ChatMessage(role="user", content=content)


def system(content: str) -> ChatMessage:
    """Return a system message."""
    return ChatMessage(role="system", content=content)


def assistant(answer: str | GenerateResult) -> ChatMessage:
    """Return a message of the assistant: an earlier answer of the model, or a text.

    An answer keeps its reasoning and its tool calls. Arguments that are no JSON object become "{}",
    because the server refuses others in a conversation. An answer has such arguments if it was cut
    off, or if the model wrote a malformed call.
    """
    if not isinstance(answer, GenerateResult):
        return ChatMessage(role="assistant", content=answer)
    return ChatMessage(
        role="assistant",
        content=answer.text,
        tool_calls=tuple(map(with_object_arguments, answer.tool_calls)),
        reasoning=answer.reasoning,
    )


def with_new_id(request: GenerateRequest) -> GenerateRequest:
    """Return a request with a new id. An id that the caller has chosen is kept."""
    if request.request_id is None or not _GENERATED_ID.fullmatch(request.request_id):
        return request
    return replace(request, request_id=RequestId(_generate_id()))


def _generate_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def make_request(prompt: PromptLike, options: GenerateOptions) -> GenerateRequest:
    """Return the request for a prompt and options. Raises InvalidRequestError for unknown options
    and invalid values.

    The server checks the ranges of values, because they depend on the model.
    """
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise InvalidRequestError(
            f"unknown options: {', '.join(sorted(unknown))}", reason="UNKNOWN_OPTION"
        )
    drafter = options.get("drafter")
    resume = _flag(options, "resume", True)
    # Chosen here, so that it is known even if the first message never comes.
    request_id = options.get("request_id", _generate_id() if resume else None)
    rule = options.get("rule")
    return GenerateRequest(
        prompt=_apply_chat_options(make_prompt(prompt), options),
        request_id=None if request_id is None else RequestId(request_id),
        model=options.get("model"),
        sampling=SamplingOptions(
            **{name: options[name] for name in _SAMPLING if name in options},  # type: ignore[literal-required]
            seed=_seed(options),
            rule=None if rule is None else _member(Rule, rule, "rule"),
            banned_token_ids=_ids(options, "banned_token_ids"),
            logit_bias=_biases(options),
            allowed_token_ids=_allowed(options),
            bad_words=_strings(options, "bad_words"),
        ),
        stopping=StoppingOptions(
            max_tokens=options.get("max_tokens"),
            min_tokens=options.get("min_tokens"),
            stop=_strings(options, "stop"),
            stop_token_ids=_ids(options, "stop_token_ids"),
            ignore_eos=options.get("ignore_eos"),
            include_stop_str_in_output=options.get("include_stop_str_in_output", False),
        ),
        speculation=SpeculationOptions(
            enabled=_flag(options, "speculate", None),
            method=None if drafter is None else _member(DraftMethod, drafter, "drafter"),
            draft_tokens=options.get("draft_tokens"),
            draft_top_k=options.get("draft_top_k"),
            look_ahead=options.get("look_ahead"),
            fan_out=options.get("fan_out"),
        ),
        priority=options.get("priority", 0),
        resumable=resume,
        top_logprobs=options.get("top_logprobs"),
        structured_output=_structured(options),
        skip_special_tokens=options.get("skip_special_tokens"),
        return_prompt_token_ids=options.get("return_prompt_token_ids", False),
    )


def make_prompt(prompt: PromptLike) -> Prompt:
    """Convert a text, a sequence of token ids or a sequence of chat messages to a prompt.

    Raises InvalidRequestError (INVALID_PROMPT) for any other value.
    """
    match prompt:
        case TextPrompt(text=found) | TokenPrompt(token_ids=found):
            made = _made_prompt(found)
            if made is not None and type(made) is type(prompt):
                return made
        case ChatPrompt(messages=found):
            made = _made_prompt(found)
            if isinstance(made, ChatPrompt):
                return replace(prompt, messages=made.messages)
        case _:
            made = _made_prompt(prompt)
            if made is not None:
                return made
    raise InvalidRequestError(
        "a prompt must be a non-empty string, sequence of token ids or sequence of ChatMessages; "
        "roles and contents of messages must be strings",
        reason="INVALID_PROMPT",
    )


def _made_prompt(found: Any) -> Prompt | None:
    """Return the prompt for a text or for the items of a sequence; None if it is not a prompt."""
    if isinstance(found, str):
        return TextPrompt(found) if found and is_text(found) else None
    # Bytes and mappings have items, too, which nobody means.
    listed = isinstance(found, Iterable) and not isinstance(found, (bytes, Mapping))
    items: tuple[Any, ...] = tuple(found) if listed else ()
    if not items:
        return None
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return TokenPrompt(items)
    if all(isinstance(item, ChatMessage) for item in items):
        good = all(is_text(item.role) and is_text(item.content) for item in items)
        return ChatPrompt(items) if good else None
    return None


def _apply_chat_options(prompt: Prompt, options: GenerateOptions) -> Prompt:
    """Return the prompt with the options of tools, of reasoning and of the chat template. Options
    that are left out keep what a `ChatPrompt` says."""
    given = [name for name in _CHAT if name in options]
    if not given:
        return prompt
    if not isinstance(prompt, ChatPrompt):
        raise InvalidRequestError(
            f"{given[0]} needs a conversation as the prompt", reason="INVALID_OPTION"
        )
    tools = prompt.tools
    if "tools" in options:
        tools = replace(tools, tools=make_tools(options["tools"]))
    if "parallel_tool_calls" in options:
        tools = replace(tools, parallel=_flag(options, "parallel_tool_calls", True))
    if "tool_choice" in options:
        tools = choose_tools(tools.tools, options["tool_choice"], parallel=tools.parallel)
    prompt = replace(prompt, tools=tools)
    if "reasoning_effort" in options:
        prompt = replace(prompt, reasoning_effort=options["reasoning_effort"])
    if "thinking_token_budget" in options:
        prompt = replace(prompt, thinking_token_budget=options["thinking_token_budget"])
    if "chat_template_kwargs" in options:
        prompt = replace(prompt, template_variables=_template_variables(options))
    return prompt


def _template_variables(options: GenerateOptions) -> str:
    """Return the variables of the chat template as a JSON object."""
    variables: object = options.get("chat_template_kwargs")
    if isinstance(variables, Mapping):
        try:
            return json.dumps(variables, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    raise _not(options, "chat_template_kwargs", "a mapping of JSON's values")


def _structured(options: GenerateOptions) -> StructuredOutput | None:
    """Return the structured-output constraint that the options set; None if they set none."""
    found: list[StructuredOutput] = []
    if options.get("json_schema") is not None:
        found.append(StructuredOutput(StructuredKind.JSON_SCHEMA, _schema(options)))
    if _flag(options, "json_object", False):
        found.append(StructuredOutput(StructuredKind.JSON_OBJECT))
    for name, kind in (("regex", StructuredKind.REGEX), ("grammar", StructuredKind.GRAMMAR)):
        text: Any = options.get(name)
        if text is not None:
            if not is_text(text):
                raise _not(options, name, "a text")
            found.append(StructuredOutput(kind, text))
    if len(found) > 1:
        raise InvalidRequestError(
            "at most one of json_schema, json_object, regex and grammar may be given",
            reason="INVALID_STRUCTURE",
        )
    return found[0] if found else None


def _schema(options: GenerateOptions) -> str:
    """Return the JSON schema of the options as JSON text. The values true and false are schemas,
    too."""
    schema: object = options.get("json_schema")
    if isinstance(schema, str) and is_text(schema):
        return schema
    if isinstance(schema, (Mapping, bool)):
        try:
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    raise _not(options, "json_schema", "a JSON schema, as a mapping of JSON's values or as a text")


def _flag(options: GenerateOptions, name: str, default: FlagT) -> bool | FlagT:
    """Return the boolean option `name`, or `default` if it was left out."""
    value: Any = options.get(name, default)
    if value is not default and not isinstance(value, bool):
        raise _not(options, name, "true or false")
    return value


def _allowed(options: GenerateOptions) -> tuple[int, ...]:
    """Return the allowed token ids. An empty list is refused, because the server would take it as
    no limit."""
    allowed = _ids(options, "allowed_token_ids")
    if "allowed_token_ids" in options and not allowed:
        raise InvalidRequestError(
            "allowed_token_ids must contain at least one id", reason="INVALID_OPTION"
        )
    return allowed


def _ids(options: GenerateOptions, name: str) -> tuple[int, ...]:
    try:
        return tuple(options.get(name, ()))  # type: ignore[arg-type]
    except TypeError:
        raise _not(options, name, "a sequence of token ids") from None


def _biases(options: GenerateOptions) -> tuple[tuple[int, float], ...]:
    biases: object = options.get("logit_bias", {})
    if not isinstance(biases, Mapping):
        raise _not(options, "logit_bias", "a mapping of token ids to amounts")
    return tuple(biases.items())


def _strings(options: GenerateOptions, name: str) -> tuple[str, ...]:
    texts: Any = options.get(name, ())
    try:
        return (texts,) if isinstance(texts, str) else tuple(texts)
    except TypeError:
        raise _not(options, name, "a text or a sequence of texts") from None


def _not(options: GenerateOptions, name: str, wanted: str) -> InvalidRequestError:
    return invalid_argument(name, wanted, options.get(name))


def _seed(options: GenerateOptions) -> int | None:
    """Return the seed as an unsigned 64-bit integer. A negative seed stands for itself plus
    2^64."""
    seed: Any = options.get("seed")
    return seed & UINT64_MAX if isinstance(seed, int) and MIN_SEED <= seed < 0 else seed


def _member(kind: type[EnumT], value: str, name: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise invalid_argument(name, f"one of {allowed}", value) from None
