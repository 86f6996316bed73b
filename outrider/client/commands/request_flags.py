"""Command-line flags that set the SDK's options of a request."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

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
    group = parser.add_argument_group("structured output (at most one of these)")
    forms = group.add_mutually_exclusive_group()
    for flag in STRUCTURED_FLAGS:
        forms.add_argument(flag.flag, **flag.facts)


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """Return the request options that the given flags set. Raises InvalidRequestError if a file
    that a flag names cannot be read."""
    options = {flag.option: getattr(args, flag.name) for flag in (*FLAGS, *STRUCTURED_FLAGS)}
    options |= {"look_ahead": args.look_ahead, "fan_out": args.fan_out}
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
