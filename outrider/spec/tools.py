"""Tools and tool calls of chat requests and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

MAX_TOOLS = 1024
"""Largest number of tools of a request."""
MAX_TOOL_CALLS = 128
"""Largest number of tool calls of one message."""
MAX_TEMPLATE_VARIABLES_BYTES = 1 << 16
"""Largest size of the template variables of a request, in bytes of UTF-8."""

MAX_JSON_DEPTH: Final = 64
"""Largest nesting depth of arguments, schemas and template variables."""
_TOO_DEEP: Final = f"may be nested at most {MAX_JSON_DEPTH} levels deep"
_MAX_INT_DIGITS: Final = 4300
"""Largest number of digits of an integer, which is Python's own limit."""
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


class ToolChoiceMode(StrEnum):
    """Whether the model may or must call tools."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """The tools are left out of the prompt, and no calls are read."""
    REQUIRED = "required"
    """The answer consists of calls; a grammar enforces it."""
    NAMED = "named"
    """The answer is a call of one tool; a grammar enforces it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model made."""

    call_id: str
    """Id, which the message with the tool's result repeats."""
    name: str
    """Name of the tool."""
    arguments: str
    """Arguments: a JSON object, unless the model wrote something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A new part of a tool call."""

    index: int
    """Index of the call in the answer, from 0."""
    call_id: str = ""
    """Id of the call, in its first part; "" in later parts."""
    name: str = ""
    """Name of the tool, in the first part of a call; "" in later parts."""
    arguments: str = ""
    """New text of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    """What the tool does, for the model."""
    parameters: str = ""
    """JSON schema of the arguments, an object's; "" for a tool without arguments."""
    strict: bool | None = None
    """OpenAI's flag, which templates may render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """Tools of a request, and whether they must be called."""

    tools: tuple[Tool, ...] = ()
    """Tools with distinct names."""
    choice: ToolChoiceMode = ToolChoiceMode.AUTO
    named: str = ""
    """Tool that must be called, with the mode NAMED; "" otherwise."""
    parallel: bool = True
    """Whether an answer may have several calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParsing:
    """How the router splits an answer into reasoning, content and tool calls."""

    tool_format: str = ""
    """Name of the format of tool calls; "" if none are read."""
    reasoning_format: str = ""
    """Name of the format of reasoning; "" if none is read."""
    is_reasoning_open: bool = False
    """Whether the prompt ends inside the reasoning."""
    parallel: bool = True
    """Whether calls after the first one are kept."""
    tool_names: tuple[str, ...] = ()
    """Names of the request's tools, at most `MAX_TOOLS`, if the format of tool calls needs them to
    distinguish calls from other text; otherwise empty."""
    call_id_seed: int = 0
    """Random number of 63 bits, from which the ids of the answer's tool calls follow. Answers to
    requests with equal ids thus have different call ids, and a resumed stream has the same."""


def join_call_deltas(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the complete calls of an answer from their parts, in the order of their indices."""
    parts: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(
            call_id="".join(part.call_id for part in parts[index]),
            name="".join(part.name for part in parts[index]),
            arguments="".join(part.arguments for part in parts[index]),
        )
        for index in sorted(parts)
    )


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a text, such as the arguments of a call in a conversation.

    Raises ValueError, whose message says what is allowed and begins with a verb: for other texts,
    for more than `MAX_JSON_DEPTH` levels, and for half of a surrogate pair.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {text[:40]!r}")
    if _depth(found) > MAX_JSON_DEPTH:
        raise ValueError(_TOO_DEEP)
    # Only an escape can stand for half of a pair, and no prompt can be made of it.
    if "\\u" in text and _SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        raise ValueError("has half of a surrogate pair, which is no text")
    return found


def with_object_arguments(call: ToolCall) -> ToolCall:
    """Return a call of an answer as a conversation may have it. Arguments that are no JSON object
    become "{}": the model wrote them so, or the answer was cut off."""
    try:
        parse_json_object(call.arguments)
    except ValueError:
        return replace(call, arguments="{}")
    return call


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _parse_int(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INT_DIGITS:
        raise ValueError(f"an integer has more than {_MAX_INT_DIGITS} digits")
    return int(text)


def _depth(value: Any) -> int:
    """Return the nesting depth of a value, up to one more than is allowed."""
    depth, level = 0, [value]
    while level and depth <= MAX_JSON_DEPTH:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return depth
