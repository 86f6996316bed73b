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
    """In `GenerateOptions`; left out of a request where nothing is said."""
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Among parsed arguments."""
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
        {"type": integer_at_least(1), "metavar": "N", "default": DEFAULT_MAX_TOKENS},
    ),
    _Flag(
        "--min-tokens",
        "min_tokens",
        {"type": integer_at_least(0), "metavar": "N", "help": "no end of text before so many"},
    ),
    _Flag("--stop", "stop", {**_TEXT, "help": "the text ends before it; may be given again"}),
    _Flag("--stop-token", "stop_token_ids", {**_ID, "help": "ends the text, too"}),
    _Flag("--ignore-eos", "ignore_eos", _said(True, "go on past the model's own end of turn")),
    _Flag(
        "--include-stop",
        "include_stop_str_in_output",
        _said(True, "what ends the text is part of it"),
    ),
    _Flag(
        "--keep-special-tokens",
        "skip_special_tokens",
        _said(False, "special tokens are part of the text"),
    ),
    _Flag(
        "--temperature",
        "temperature",
        {**_NUMBER, "metavar": "T", "default": 0.0, "help": "0 (default) is greedy"},
    ),
    _Flag("--top-p", "top_p", {**_NUMBER, "metavar": "P"}),
    _Flag("--top-k", "top_k", {"type": integer_at_least(0), "metavar": "K"}),
    _Flag("--min-p", "min_p", {**_NUMBER, "metavar": "P"}),
    _Flag("--repetition-penalty", "repetition_penalty", {**_NUMBER, "metavar": "X"}),
    _Flag("--presence-penalty", "presence_penalty", {**_NUMBER, "metavar": "X"}),
    _Flag("--frequency-penalty", "frequency_penalty", {**_NUMBER, "metavar": "X"}),
    _Flag("--seed", "seed", {"type": parse_seed, "metavar": "N"}),
    _Flag("--rule", "rule", {"choices": [rule.value for rule in Rule], "help": "default: coupled"}),
    _Flag(
        "--logit-bias",
        "logit_bias",
        {
            "type": parse_bias,
            "action": "append",
            "metavar": "ID=AMOUNT",
            "help": "added to the logit of a token id; may be given more than once",
        },
    ),
    _Flag("--ban-token", "banned_token_ids", {**_ID, "help": "never emitted; may be given again"}),
    _Flag("--allow-token", "allowed_token_ids", {**_ID, "help": "only such; may be given again"}),
    _Flag("--bad-word", "bad_words", {**_TEXT, "help": "never written; may be given again"}),
    _Flag(
        "--logprobs",
        "top_logprobs",
        {"type": parse_top_logprobs, "metavar": "N", "help": "with --json: and the N best ids'"},
    ),
    _Flag(
        "--priority",
        "priority",
        {"type": parse_priority, "metavar": "N", "help": "greater goes first; default: 0"},
    ),
    _Flag(
        "--drafter",
        "drafter",
        {"choices": DRAFTERS, "help": "default: eagle3; ngram for a model without a head"},
    ),
    _Flag(
        "--draft-tokens",
        "draft_tokens",
        {"type": integer_at_least(0), "metavar": "N", "default": 4, "help": "a round; default: 4"},
    ),
    _Flag(
        "--draft-top-k",
        "draft_top_k",
        {
            "type": integer_at_least(1),
            "metavar": "K",
            "default": 1,
            "help": "1 (default) is a chain",
        },
    ),
)
STRUCTURED_FLAGS: Final = (
    _Flag(
        "--json-schema",
        "json_schema",
        {"type": Path, "metavar": "FILE", "help": "JSON that fits this schema"},
    ),
    _Flag("--json-object", "json_object", _said(True, "a JSON object")),
    _Flag("--regex", "regex", {"metavar": "PATTERN", "help": "a text that matches it, whole"}),
    _Flag(
        "--grammar",
        "grammar",
        {"type": Path, "metavar": "FILE", "help": "a text of this grammar (Lark)"},
    ),
)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a request."""
    for flag in FLAGS:
        parser.add_argument(flag.flag, **flag.facts)
    add_look_ahead_arguments(parser.add_argument)
    group = parser.add_argument_group("form of the answer, one of")
    forms = group.add_mutually_exclusive_group()
    for flag in STRUCTURED_FLAGS:
        forms.add_argument(flag.flag, **flag.facts)


def request_options(args: argparse.Namespace) -> GenerateOptions:
    """What every request asks for. Raises InvalidRequestError where a file cannot be read."""
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
        why = "it is not UTF-8"
    raise InvalidRequestError(f"{file} cannot be read: {why}", reason="INVALID_FLAG")
