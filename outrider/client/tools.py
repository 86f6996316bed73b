"""Tools of a conversation: made from Python functions or from OpenAI's JSON, and their results."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from outrider.client.arguments import is_text
from outrider.errors import InvalidRequestError
from outrider.spec.tools import MAX_TOOLS, Tool, ToolCall, ToolChoiceMode, ToolOptions
from outrider.wire.checks import quote_value
from outrider.wire.inference import ChatMessage

_PLAIN_TYPES: Final = (
    (str, "string"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (type(None), "null"),
)
"""Pairs of a Python type and the name of JSON Schema's type. The schema of an integer is that of
`int`, although a bool is one, too."""
_CHOICES: Final = (ToolChoiceMode.AUTO, ToolChoiceMode.NONE, ToolChoiceMode.REQUIRED)
"""Modes that `tool_choice` names; any other value is the name of a tool."""
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def function_tool(function: Callable[..., object]) -> Tool:
    """Return the tool that a Python function is for the model.

    The tool has the function's name, and its docstring as the description. The JSON schema of the
    arguments is made from the signature: a parameter without a default is required. Types may be
    str, int, float, bool, None, Any, Literal, list, dict with str keys, unions of these, and
    Annotated, whose first string is the description of the parameter.

    Raises InvalidRequestError (INVALID_TOOLS) for parameters that have no type or another one, and
    for parameters that cannot be passed by name.
    """
    if not inspect.isroutine(function):
        raise _invalid(f"a tool must be a function, got {quote_value(function)}")
    name = function.__name__
    try:
        signature = inspect.signature(function)
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        # Annotations may be texts, which are evaluated here.
        raise _invalid(f"the signature of {name} cannot be read: {error}") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in signature.parameters.values():
        where = f"parameter {parameter.name} of {name}"
        if parameter.kind not in _BY_NAME:
            raise _invalid(f"{where} cannot be passed by name")
        if parameter.name not in hints:
            raise _invalid(f"{where} needs a type")
        properties[parameter.name] = _schema_of(hints[parameter.name], where)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return Tool(
        name=name, description=inspect.getdoc(function) or "", parameters=json.dumps(schema)
    )


def _schema_of(kind: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type. `where`: what has the type, for errors."""
    for plain, name in _PLAIN_TYPES:
        if kind is plain:
            return {"type": name}
    if kind is Any:
        return {}
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        schema = _schema_of(arguments[0], where)
        texts = [each for each in arguments[1:] if isinstance(each, str)]
        return {**schema, "description": texts[0]} if texts else schema
    if origin is Literal and all(
        type(value) in (str, bool, int, type(None)) for value in arguments
    ):
        is_string = all(isinstance(value, str) for value in arguments)
        return ({"type": "string"} if is_string else {}) | {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each, where) for each in arguments]}
    if origin is list:
        (item,) = arguments or (Any,)
        return {"type": "array", "items": _schema_of(item, where)}
    if origin is dict:
        key, value = arguments or (str, Any)
        if key is str:
            return {"type": "object", "additionalProperties": _schema_of(value, where)}
    raise _invalid(
        f"{where} must have a type of str, int, float, bool, None, Any, Literal, list, dict with "
        f"str keys, or a union of these, got {quote_value(kind)}"
    )


def tool_result(call: ToolCall, content: str) -> ChatMessage:
    """Return the message with the result of a tool call, as text, for the model to read."""
    return ChatMessage(role="tool", content=content, tool_call_id=call.call_id, name=call.name)


def make_tools(values: object) -> tuple[Tool, ...]:
    """Return the tools for a sequence of `Tool`s and of OpenAI's JSON: {"type": "function",
    "function": {"name": TEXT, "description": TEXT, "parameters": JSON schema, "strict": BOOL}}.

    Raises InvalidRequestError (INVALID_TOOLS) for other values and for more than MAX_TOOLS tools.
    The server checks names and schemas.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise _invalid(f"tools must be a sequence of tools, got {quote_value(values)}")
    listed = list(islice(values, MAX_TOOLS + 1))
    if len(listed) > MAX_TOOLS:
        raise _invalid(f"at most {MAX_TOOLS} tools are allowed")
    return tuple(_make_tool(value, f"tools[{index}]") for index, value in enumerate(listed))


def _make_tool(value: object, where: str) -> Tool:
    match value:
        case Tool():
            return value
        case {"type": "function", "function": {"name": name, **fields}}:
            pass
        case _:
            hint = "; function_tool makes a tool of a function" if callable(value) else ""
            raise _invalid(
                f'{where} must be a Tool or {{"type": "function", "function": {{"name": TEXT, '
                f"...}}}}, got {quote_value(value)}{hint}"
            )
    where = f"{where}.function"
    description: Any = fields.get("description")
    strict: Any = fields.get("strict")
    description = "" if description is None else description
    for field, text in (("name", name), ("description", description)):
        if not is_text(text):
            raise _invalid(f"{where}.{field} must be a text, got {quote_value(text)}")
    if strict is not None and not isinstance(strict, bool):
        raise _invalid(f"{where}.strict must be true or false, got {quote_value(strict)}")
    return Tool(
        name=name,
        description=description,
        parameters=_parameters(fields.get("parameters"), f"{where}.parameters"),
        strict=strict,
    )


def _parameters(schema: object, where: str) -> str:
    """Return the schema of a tool's arguments as JSON; "" for None."""
    if schema is None:
        return ""
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            pass
    raise _invalid(f"{where} must be a JSON schema, got {quote_value(schema)}")


def choose_tools(tools: tuple[Tool, ...], choice: object, *, parallel: bool) -> ToolOptions:
    """Return the tools of a request with a tool choice, which is "auto", "none", "required" or the
    name of a tool that must be called. Raises InvalidRequestError (INVALID_TOOLS)."""
    for mode in _CHOICES:
        if choice == mode.value:
            return ToolOptions(tools=tools, choice=mode, parallel=parallel)
    names = [tool.name for tool in tools]
    if choice not in names:
        raise InvalidRequestError(
            f"tool_choice must be auto, none, required or the name of a tool, got "
            f"{quote_value(choice)}",
            reason="INVALID_TOOLS",
            param="tool_choice",
        )
    return ToolOptions(
        tools=tools, choice=ToolChoiceMode.NAMED, named=str(choice), parallel=parallel
    )


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_TOOLS", param="tools")
