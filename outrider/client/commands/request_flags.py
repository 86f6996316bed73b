"""Command-line flags that set the SDK's options of a request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from outrider.client.commands.tool_files import read_tools
from outrider.client.flags import (
    add_look_ahead_arguments,
    integer_at_least,
    parse_bias,
    parse_priority,
    parse_seed,
    parse_top_logprobs,
)
from outrider.client.options import GenerateOptions
from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.spec.sampling import Rule
from outrider.wire.inference import REASONING_EFFORTS

DEFAULT_MAX_TOKENS: Final = 256
DRAFTERS: Final = tuple(method.value for method in DraftMethod)


class _Flag(NamedTuple):
    flag: str
    option: str
    """Key in `GenerateOptions` that the flag sets. A request omits the key if the flag is not
    given."""
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the parsed flag in the argparse namespace."""
        return self.flag.removeprefix("--").replace("-", "_")


def _said(value: bool, help_text: str) -> dict[str, Any]:
    return {"action": "store_const", "const": value, "help": help_text}


def _parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:40]!r}")
    return found


_NUMBER: Final[dict[str, Any]] = {"type": float}
_ID: Final[dict[str, Any]] = {"type": integer_at_least(0), "action": "append", "metavar": "ID"}
_TEXT: Final[dict[str, Any]] = {"action": "append", "metavar": "TEXT"}

FLAGS: Final = (
    _Flag(
        "--max-tokens",
        "max_tokens",
        {
            "type": integer_at_least(1),
            "metavar": "N",
            "default": DEFAULT_MAX_TOKENS,
            "help": f"Largest number of tokens in the answer (default: {DEFAULT_MAX_TOKENS}).",
        },
    ),
    _Flag(
        "--min-tokens",
        "min_tokens",
        {
            "type": integer_at_least(0),
            "metavar": "N",
            "help": "Number of tokens before which the answer does not end (default: 0).",
        },
    ),
    _Flag(
        "--stop",
        "stop",
        {**_TEXT, "help": "String at which the answer ends; may be repeated."},
    ),
    _Flag(
        "--stop-token",
        "stop_token_ids",
        {**_ID, "help": "Token id at which the answer ends; may be repeated."},
    ),
    _Flag(
        "--ignore-eos",
        "ignore_eos",
        _said(True, "Continue after the model's end-of-sequence tokens."),
    ),
    _Flag(
        "--include-stop",
        "include_stop_str_in_output",
        _said(True, "Include the stop string in the answer."),
    ),
    _Flag(
        "--keep-special-tokens",
        "skip_special_tokens",
        _said(False, "Keep special tokens in the answer's text."),
    ),
    _Flag(
        "--temperature",
        "temperature",
        {
            **_NUMBER,
            "metavar": "T",
            "default": 0.0,
            "help": "Sampling temperature; 0: greedy (default: 0).",
        },
    ),
    _Flag(
        "--top-p",
        "top_p",
        {
            **_NUMBER,
            "metavar": "P",
            "help": "Total probability of the tokens that are sampled from.",
        },
    ),
    _Flag(
        "--top-k",
        "top_k",
        {
            "type": integer_at_least(0),
            "metavar": "K",
            "help": "Number of most probable tokens that are sampled from; 0: all.",
        },
    ),
    _Flag(
        "--min-p",
        "min_p",
        {
            **_NUMBER,
            "metavar": "P",
            "help": "Least probability of a sampled token, relative to the most probable one.",
        },
    ),
    _Flag(
        "--repetition-penalty",
        "repetition_penalty",
        {
            **_NUMBER,
            "metavar": "X",
            "help": "Factor that penalizes tokens of prompt and answer; 1: no penalty.",
        },
    ),
    _Flag(
        "--presence-penalty",
        "presence_penalty",
        {
            **_NUMBER,
            "metavar": "X",
            "help": "Amount subtracted from the logit of each token that the answer contains.",
        },
    ),
    _Flag(
        "--frequency-penalty",
        "frequency_penalty",
        {
            **_NUMBER,
            "metavar": "X",
            "help": "Amount subtracted from a token's logit for each occurrence in the answer.",
        },
    ),
    _Flag(
        "--seed",
        "seed",
        {"type": parse_seed, "metavar": "N", "help": "Seed of the sampling (default: random)."},
    ),
    _Flag(
        "--rule",
        "rule",
        {
            "choices": [rule.value for rule in Rule],
            "help": "Rule by which the verifier accepts draft tokens (default: coupled).",
        },
    ),
    _Flag(
        "--logit-bias",
        "logit_bias",
        {
            "type": parse_bias,
            "action": "append",
            "metavar": "ID=AMOUNT",
            "help": "Amount added to the logit of a token id; may be repeated.",
        },
    ),
    _Flag(
        "--ban-token",
        "banned_token_ids",
        {**_ID, "help": "Token id that the answer must not contain; may be repeated."},
    ),
    _Flag(
        "--allow-token",
        "allowed_token_ids",
        {
            **_ID,
            "help": "Token id that the answer may contain (default: all); may be repeated.",
        },
    ),
    _Flag(
        "--bad-word",
        "bad_words",
        {**_TEXT, "help": "Text that the answer must not contain; may be repeated."},
    ),
    _Flag(
        "--logprobs",
        "top_logprobs",
        {
            "type": parse_top_logprobs,
            "metavar": "N",
            "help": "Return log probabilities of each token and of the N most probable ones; needs "
            "--json.",
        },
    ),
    _Flag(
        "--priority",
        "priority",
        {
            "type": parse_priority,
            "metavar": "N",
            "help": "Priority; requests with a greater one are served first (default: 0).",
        },
    ),
    _Flag(
        "--drafter",
        "drafter",
        {
            "choices": DRAFTERS,
            "help": "Draft method (default: eagle3, or ngram if the model has no draft head).",
        },
    ),
    _Flag(
        "--draft-tokens",
        "draft_tokens",
        {
            "type": integer_at_least(0),
            "metavar": "N",
            "default": 4,
            "help": "Number of draft tokens in each round (default: 4).",
        },
    ),
    _Flag(
        "--draft-top-k",
        "draft_top_k",
        {
            "type": integer_at_least(1),
            "metavar": "K",
            "default": 1,
            "help": "Branching factor of the draft tree; 1: a chain (default: 1).",
        },
    ),
)
CHAT_FLAGS: Final = (
    _Flag(
        "--tools",
        "tools",
        {
            "metavar": "FILE",
            "type": Path,
            "help": "JSON file with the tools that the model may call, as OpenAI's API takes them: "
            'a list of {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}, or '
            "one of these.",
        },
    ),
    _Flag(
        "--tool-choice",
        "tool_choice",
        {
            "metavar": "auto|none|required|NAME",
            "help": "Whether the model must call tools; needs --tools. required: at least one "
            "call; NAME: a call of this tool; auto: the model decides; none: no calls (default: "
            "auto).",
        },
    ),
    _Flag(
        "--no-parallel-tool-calls",
        "parallel_tool_calls",
        _said(False, "Return at most one tool call."),
    ),
    _Flag(
        "--reasoning-effort",
        "reasoning_effort",
        {
            "choices": REASONING_EFFORTS,
            "help": "How much the model should think, for chat templates that know it. none: "
            "templates that can switch thinking off do so.",
        },
    ),
    _Flag(
        "--thinking-token-budget",
        "thinking_token_budget",
        {
            "type": integer_at_least(0),
            "metavar": "N",
            "help": "Largest number of tokens of reasoning. When they are used up, the model must "
            "end its reasoning.",
        },
    ),
    _Flag(
        "--chat-template-kwargs",
        "chat_template_kwargs",
        {
            "metavar": "JSON",
            "type": _parse_object,
            "help": "Further variables of the chat template, as a JSON object.",
        },
    ),
)
STRUCTURED_FLAGS: Final = (
    _Flag(
        "--json-schema",
        "json_schema",
        {"type": Path, "metavar": "FILE", "help": "JSON Schema that the answer must match."},
    ),
    _Flag("--json-object", "json_object", _said(True, "Require the answer to be a JSON object.")),
    _Flag(
        "--regex",
        "regex",
        {"metavar": "PATTERN", "help": "Regular expression that the whole answer must match."},
    ),
    _Flag(
        "--grammar",
        "grammar",
        {"type": Path, "metavar": "FILE", "help": "Lark grammar that the answer must match."},
    ),
)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the options of a request to a parser."""
    for flag in FLAGS:
        parser.add_argument(flag.flag, **flag.facts)
    add_look_ahead_arguments(parser.add_argument)
    chat = parser.add_argument_group("tools and reasoning")
    for flag in CHAT_FLAGS:
        chat.add_argument(flag.flag, **flag.facts)
    group = parser.add_argument_group("structured output (at most one of these)")
    forms = group.add_mutually_exclusive_group()
    for flag in STRUCTURED_FLAGS:
        forms.add_argument(flag.flag, **flag.facts)


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """Return the request options that the given flags set. Raises InvalidRequestError or
    NotFoundError if a file that a flag names cannot be read."""
    if args.tool_choice is not None and args.tools is None:
        raise InvalidRequestError("--tool-choice needs --tools", reason="INVALID_FLAG")
    flags = (*FLAGS, *CHAT_FLAGS, *STRUCTURED_FLAGS)
    options = {flag.option: getattr(args, flag.name) for flag in flags}
    options |= {"look_ahead": args.look_ahead, "fan_out": args.fan_out}
    if args.tools is not None:
        options["tools"] = read_tools(args.tools)
    said: dict[str, Any] = {
        option: _text_of(value) if isinstance(value, Path) else value
        for option, value in options.items()
        if value is not None
    }
    said.setdefault("drafter", DraftMethod.EAGLE3)
    if "logit_bias" in said:
        said["logit_bias"] = dict(said["logit_bias"])
    return cast(GenerateOptions, said)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    raise InvalidRequestError(f"{file} cannot be read: {why}", reason="INVALID_FLAG")
