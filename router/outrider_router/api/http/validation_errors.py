"""Error messages for invalid bodies: pydantic's errors in plain words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.transport.error_codec import MAX_MESSAGE_CHARS
from outrider_router.api.http.unsupported_fields import (
    MESSAGE,
    UnsupportedFieldError,
    refuse_unsupported,
)

UNION_TAG: Final = "~"
"""Prefix of the names of union members in `request_models`, which error messages must not show."""
_MAX_TOLD: Final = 3
"""Largest number of mistakes of a body that one error message lists."""
_MAX_QUOTED: Final = 40
"""Largest number of characters of a value that an error message quotes."""
_RULES: Final = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}
"""Error messages by pydantic's error type. Fields in braces come from pydantic's error context."""
_UNIONS: Final = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts of type 'text'",
    "input": "a string or a list of items",
    "input.content": "a string or a list of parts of type 'input_text' or 'output_text'",
    "output": "a string or a list of parts of type 'input_text'",
    "tool_choice": "'none', 'auto', 'required' or an object that names a function",
    "guided_json": "an object, or a string that holds one",
    "json": "an object, or a string that holds one",
}
"""Descriptions of the values that fields of several types accept, by the name of the field, or by
the first and the last name of its path."""
_KEYS: Final = {
    "logit_bias": "token ids",
    "metadata": "strings of at most 64 characters",
}
"""Descriptions of the keys of fields that are objects."""
_TYPES: Final = frozenset(
    {"string_type", "list_type", "dict_type", "model_type", "model_attributes_type"}
)
_UNTOLD: Final = frozenset({"missing", "too_short", "too_long", "string_too_short", "value_error"})
"""Error types whose message does not quote the value."""
_ONE: Final = re.compile(r"\b1 (entries|characters)\b")

Mistake = Mapping[str, Any]


def describe_validation_errors(mistakes: Sequence[Mistake], body: object) -> InvalidRequestError:
    """Return the error for a body with these mistakes. The error's `param` is the path of the first
    wrong field, or "" if the body as a whole is wrong.
    """
    unsupported = _unsupported_turn(mistakes, body)
    if unsupported is not None:
        return unsupported
    told = _without_followers(mistakes)
    messages = [_message(mistake) for mistake in told[:_MAX_TOLD]]
    if len(told) > _MAX_TOLD:
        messages.append(f"and {len(told) - _MAX_TOLD} more")
    param = _path(told[0]) if told else ""
    text = "; ".join(messages)[:MAX_MESSAGE_CHARS]
    return InvalidRequestError(text, reason="INVALID_REQUEST", param=param)


def _unsupported_turn(mistakes: Sequence[Mistake], body: object) -> UnsupportedFieldError | None:
    """Return the error for a history with tool calls, or None. The error names the tool calls, not
    the content that such messages lack.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list):
        return None
    for mistake in mistakes:
        match tuple(mistake["loc"][1:]):
            case ("messages", int() as number, *_) if number < len(messages):
                error = _unsupported_in(messages[number], f"messages[{number}]")
                if error is not None:
                    return error
    return None


def _unsupported_in(message: object, where: str) -> UnsupportedFieldError | None:
    if not isinstance(message, dict):
        return None
    role = message.get("role")
    if role == "function":
        return UnsupportedFieldError(
            f"{where}.role 'function' is not supported: the result of a tool has the role 'tool'",
            param=f"{where}.role",
        )
    try:
        refuse_unsupported(message, MESSAGE, f"{where}.")
    except UnsupportedFieldError as error:
        return error
    return None


def _without_followers(mistakes: Sequence[Mistake]) -> Sequence[Mistake]:
    """Remove mistakes that only follow from others: fields missing from an object of the wrong
    type, and errors of further members of a union.
    """
    found: dict[str, Mistake] = {}
    parents = {_parent(mistake) for mistake in mistakes if mistake["type"] == "literal_error"}
    for mistake in mistakes:
        if mistake["type"] != "missing" or _parent(mistake) not in parents:
            found.setdefault(_path(mistake), mistake)
    return list(found.values())


def _parent(mistake: Mistake) -> tuple[object, ...]:
    return tuple(mistake["loc"][:-1])


def _path(mistake: Mistake) -> str:
    """Return the path of the field as in JavaScript and Python, such as `messages[0].role`; "" is
    the whole body.
    """
    parts: list[str] = []
    for part in mistake["loc"][1:]:
        if isinstance(part, int):
            parts.append(f"[{part}]")
        elif part != "[key]" and not part.startswith(UNION_TAG):
            parts.append(f".{part}" if parts else part)
    return "".join(parts)[:MAX_MESSAGE_CHARS]


def _message(mistake: Mistake) -> str:
    path, kind, last = _path(mistake), mistake["type"], mistake["loc"][-1]
    if not path:
        return "The body must be a JSON object"
    if last == "[key]":
        parent = path.partition(".")[0]
        return f"{parent} must have {_KEYS[parent]} as keys, got {_quoted(mistake)}"
    names = re.split(r"[.\[]", path)
    union = _UNIONS.get(f"{names[0]}.{names[-1]}", _UNIONS.get(names[-1]))
    if kind in _TYPES and isinstance(last, str) and last.startswith(UNION_TAG) and union:
        rule = f"must be {union}"
    elif kind in _RULES:
        rule = _ONE.sub(_singular, _RULES[kind].format_map(mistake.get("ctx") or {}))
    else:
        rule = mistake["msg"].replace("Input should", "must")
    return f"{path} {rule}" if kind in _UNTOLD else f"{path} {rule}, got {_quoted(mistake)}"


def _singular(found: re.Match[str]) -> str:
    return "1 entry" if found[1] == "entries" else "1 character"


def _quoted(mistake: Mistake) -> str:
    """Return the invalid value for an error message; objects and lists are only named."""
    value = mistake.get("input")
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            cut = value[:_MAX_QUOTED]
            return json.dumps(cut, ensure_ascii=False) + ("..." if len(value) > _MAX_QUOTED else "")
        case _:
            return json.dumps(value, default=repr)[:_MAX_QUOTED]
