"""Request options of the client: `GenerateOptions`, and their translation into a request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict, TypeVar

from outrider.client.arguments import invalid_argument, is_text
from outrider.errors import InvalidRequestError
from outrider.ids import RequestId
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import MIN_SEED, UINT64_MAX, Rule
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.wire.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    SamplingOptions,
    SpeculationOptions,
    StoppingOptions,
    TextPrompt,
    TokenPrompt,
)

PromptLike = str | Sequence[int] | Sequence[ChatMessage] | Prompt
"""Prompt of a request: a string, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation request; the server chooses those that are left out."""

    max_tokens: int
    """Maximum number of tokens to emit."""
    min_tokens: int
    """Number of tokens before which neither a stop token nor a stop string ends the answer."""
    stop: Sequence[str]
    """Stop strings; the text ends before the first one that occurs."""
    stop_token_ids: Sequence[int]
    """Token ids that end the answer, in addition to the model's end-of-turn ids."""
    ignore_eos: bool
    """Whether to continue after the model's end-of-turn ids."""
    include_stop_str_in_output: bool
    """Whether the text includes the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool
    """Whether special tokens are left out of the text."""
    temperature: float
    """Sampling temperature; 0 decodes greedily."""
    top_p: float
    """Total probability of the most probable tokens that are sampled from, in (0, 1]."""
    top_k: int
    """Number of most probable tokens that are sampled from; 0 is all."""
    min_p: float
    """Least probability of a sampled token, relative to the most probable one, in [0, 1]."""
    repetition_penalty: float
    """Factor that penalizes tokens of prompt and answer; 1 is no penalty."""
    presence_penalty: float
    """Amount subtracted from the logit of each token that the answer contains."""
    frequency_penalty: float
    """Amount subtracted from a token's logit for each of its occurrences in the answer."""
    seed: int
    """Seed of 64 bits; a negative value means itself plus 2^64. The same seed gives the same text;
    under the rules rejection and target-only the text also depends on the drafts."""
    rule: Rule | str
    """Acceptance rule at temperature > 0: coupled, rejection, target-only or greedy."""
    banned_token_ids: Sequence[int]
    """Token ids that are never emitted."""
    logit_bias: Mapping[int, float]
    """Values in [-100, 100] that are added to the logits of token ids."""
    allowed_token_ids: Sequence[int]
    """The only token ids that may be emitted, at least one. End-of-turn ids must be listed, too."""
    bad_words: Sequence[str]
    """Words that are never emitted as the token sequences that the tokenizer makes of them, alone
    and after a space."""
    json_schema: Mapping[str, Any] | str
    """JSON schema of the answer. At most one of json_schema, json_object, regex and grammar."""
    json_object: bool
    """Whether the answer must be a JSON object."""
    regex: str
    """Regular expression that the whole answer matches."""
    grammar: str
    """Context-free grammar of the answer, in Lark's syntax."""
    speculate: bool
    """Whether to use speculative decoding."""
    drafter: DraftMethod | str
    """Draft method: eagle3, eagle, ngram, model or none."""
    draft_tokens: int
    """Draft tokens (tree nodes) per round."""
    draft_top_k: int
    """Children per expanded node of the draft tree; 1 drafts a chain."""
    look_ahead: int
    """1 lets the verifier's planner use look-ahead (drafts made before the verdict that they
    continue); 0 never uses it."""
    fan_out: int
    """Outcomes per round for which look-ahead makes drafts, at most 64; 0 lets the drafter
    choose."""
    top_logprobs: int
    """Number of most probable ids, in [0, 20], whose log-probabilities are returned with those of
    the emitted tokens; 0 returns only the latter."""
    return_prompt_token_ids: bool
    """Whether the answer, or the first message of a stream, contains the token ids of the
    prompt."""
    model: str
    """Name of a served model."""
    request_id: str
    """Id of the request for `abort`; unique among running requests."""
    priority: int
    """Priority in [-100, 100], default 0. Requests of higher priority go first and may preempt
    others."""
    resume: bool
    """Whether the request survives a lost connection, which the client reopens, and a restart of a
    router with a journal; default True. Otherwise it ends with its connection."""


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


def user(content: str) -> ChatMessage:
    """Create a message of the user."""
    return ChatMessage(role="user", content=content)


def system(content: str) -> ChatMessage:
    """Create a system message."""
    return ChatMessage(role="system", content=content)


def assistant(content: str) -> ChatMessage:
    """Return a message of the assistant: an earlier answer of the model."""
    return ChatMessage(role="assistant", content=content)


def make_request(prompt: PromptLike, options: GenerateOptions) -> GenerateRequest:
    """Build the request of a prompt and its options. Raises InvalidRequestError for invalid values.

    The server checks ranges, because it knows the model.
    """
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise InvalidRequestError(
            f"unknown options: {', '.join(sorted(unknown))}", reason="UNKNOWN_OPTION"
        )
    drafter = options.get("drafter")
    resume = _flag(options, "resume", True)
    # Chosen here, so that it is known even if the first message never comes.
    request_id = options.get("request_id", f"req-{secrets.token_hex(12)}" if resume else None)
    rule = options.get("rule")
    return GenerateRequest(
        prompt=make_prompt(prompt),
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
    """Convert a text, chat messages or token ids to a prompt. The types of the value and of its
    items decide which of the three it is.

    Raises InvalidRequestError (INVALID_PROMPT).
    """
    match prompt:
        case TextPrompt(text=found) | TokenPrompt(token_ids=found) | ChatPrompt(messages=found):
            made = _made_prompt(found)
            if made is not None and type(made) is type(prompt):
                return made
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
    """Return the prompt of a text or of a sequence's items, or None if it is no prompt."""
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


def _structured(options: GenerateOptions) -> StructuredOutput | None:
    """Return the structured-output constraint of the options, if there is one."""
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
    """Return a JSON schema as text; true and false are schemas, too."""
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
    """Return a boolean option, or `default` if it was left out."""
    value: Any = options.get(name, default)
    if value is not default and not isinstance(value, bool):
        raise _not(options, name, "true or false")
    return value


def _allowed(options: GenerateOptions) -> tuple[int, ...]:
    """Return the allowed ids. An empty list is refused, because it would be read as no limit."""
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
    """Return the seed as an unsigned 64-bit integer; a negative seed means itself plus 2^64."""
    seed: Any = options.get("seed")
    return seed & UINT64_MAX if isinstance(seed, int) and MIN_SEED <= seed < 0 else seed


def _member(kind: type[EnumT], value: str, name: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise invalid_argument(name, f"one of {allowed}", value) from None
