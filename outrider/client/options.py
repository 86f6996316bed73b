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
"""A text, token ids, or a conversation."""


class GenerateOptions(TypedDict, total=False):
    """Options of a generation request; the server chooses those that are left out."""

    max_tokens: int
    """Most tokens to emit."""
    min_tokens: int
    """Tokens within which neither a stop token nor a stop string ends the text."""
    stop: Sequence[str]
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int]
    """Ids that end the text beside the model's own."""
    ignore_eos: bool
    """Go on past the model's end-of-turn ids."""
    include_stop_str_in_output: bool
    """True: what ends the text, a stop string or the text of a stop token, is part of it."""
    skip_special_tokens: bool
    """False: special tokens are part of the text."""
    temperature: float
    """0 decodes greedily."""
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    """The same seed gives the same text; 64 bits, a negative one stands for itself plus 2^64."""
    rule: Rule | str
    """Acceptance rule at temperature > 0: coupled, rejection, target-only or greedy."""
    banned_token_ids: Sequence[int]
    """Ids that are never emitted."""
    logit_bias: Mapping[int, float]
    """What is added to the logits of ids; amounts in [-100, 100]."""
    allowed_token_ids: Sequence[int]
    """Only these are emitted, an end-of-turn id if it is one of them; at least one."""
    bad_words: Sequence[str]
    """Texts that are never emitted in the tokens that write them, alone and behind a space."""
    json_schema: Mapping[str, Any] | str
    """The answer is a JSON value that fits this schema. Of this and the next three one at most."""
    json_object: bool
    """True: the answer is a JSON object."""
    regex: str
    """The whole answer matches this regular expression."""
    grammar: str
    """The answer is a text of this grammar, in Lark's syntax."""
    speculate: bool
    """False decodes plainly."""
    drafter: DraftMethod | str
    """Draft source: eagle3, eagle, ngram, model or none."""
    draft_tokens: int
    """Draft nodes a round."""
    draft_top_k: int
    """Children per expanded node; 1 drafts a chain."""
    look_ahead: int
    """0 drafts in lock-step; 1 lets the verifier's planner have drafts made ahead of verdicts."""
    fan_out: int
    """Outcomes drafted ahead a round, at most 64; 0 leaves them to the drafter."""
    top_logprobs: int
    """Log-probabilities of the emitted tokens, and of so many of the most probable ids in their
    places; in [0, 20], 0 gives the emitted tokens' alone."""
    return_prompt_token_ids: bool
    """True: the answer, or the beginning of a stream, has the ids of the prompt."""
    model: str
    """Name of a served model."""
    request_id: str
    """Unique among running requests; for `abort`."""
    priority: int
    """Greater goes first, and may preempt lesser ones; in [-100, 100], default 0."""
    resume: bool
    """True (default): the request outlives a broken connection, which is mended unseen, and a
    restart of a router with a journal. False: it ends with its connection."""


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
    """A turn of the user."""
    return ChatMessage(role="user", content=content)


def system(content: str) -> ChatMessage:
    """A system message."""
    return ChatMessage(role="system", content=content)


def assistant(content: str) -> ChatMessage:
    """An earlier answer of the model."""
    return ChatMessage(role="assistant", content=content)


def make_request(prompt: PromptLike, options: GenerateOptions) -> GenerateRequest:
    """The request that a prompt and its options mean; InvalidRequestError for what cannot be one.

    Ranges are checked by the server, which knows the model.
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
    """The prompt that was meant: by the type of a sequence's items.

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
    """The prompt of a text or of a sequence's items; None: it is none."""
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
    """The form that is asked for, if one is."""
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
    """A JSON schema as its text; true and false are schemas, too."""
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
    """An option that is true or false, or was left out."""
    value: Any = options.get(name, default)
    if value is not default and not isinstance(value, bool):
        raise _not(options, name, "true or false")
    return value


def _allowed(options: GenerateOptions) -> tuple[int, ...]:
    """The only ids that may come, where that was said: none of them would read as all."""
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
    """64 bits; a negative one stands for itself plus 2^64, as over HTTP."""
    seed: Any = options.get("seed")
    return seed & UINT64_MAX if isinstance(seed, int) and MIN_SEED <= seed < 0 else seed


def _member(kind: type[EnumT], value: str, name: str) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise invalid_argument(name, f"one of {allowed}", value) from None
