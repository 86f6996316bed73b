"""Conversations as the chat template reads them: messages, tools and variables. Pure.

Checks what the message types leave open: JSON texts, names of tools, and which fields a role may
have. Roles are checked by the template. Errors name the field as OpenAI's API does.
"""

from __future__ import annotations

import re
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.spec.tools import (
    MAX_TEMPLATE_VARIABLES_BYTES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoiceMode,
    ToolOptions,
    parse_json_object,
)
from outrider.text.template_traits import TemplateTraits
from outrider.wire.inference import REASONING_EFFORTS, ChatMessage, ChatPrompt
from outrider_router.requests.parsed_answer import to_short_call_id

TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names that a tool may have, as in OpenAI's API."""
_SERVER_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that only the server sets."""
_HARMONY_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Efforts that models of the harmony format were not trained with, and the nearest that they
were."""


def template_messages(prompt: ChatPrompt, traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return the messages of a conversation as values of JSON's types, in the form that a template
    with these traits reads. Raises InvalidRequestError."""
    return [
        _message(message, f"messages[{index}]", traits)
        for index, message in enumerate(prompt.messages)
    ]


def _message(message: ChatMessage, where: str, traits: TemplateTraits) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        if message.role != "assistant":
            raise _invalid(f"{where}.tool_calls", "only messages of the assistant have tool_calls")
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            raise _invalid(f"{where}.tool_calls", f"at most {MAX_TOOL_CALLS} calls are allowed")
        if len(message.tool_calls) > 1 and traits.has_single_calls:
            raise _invalid(
                f"{where}.tool_calls",
                "the model's chat template allows one tool call in a message, got "
                f"{len(message.tool_calls)}; write each call in a message of its own, with its "
                "result behind it",
            )
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]", traits)
            for index, call in enumerate(message.tool_calls)
        ]
        if traits.has_null_content and not message.content:
            found["content"] = None
    if message.role == "tool":
        found["tool_call_id"] = _call_id(message.tool_call_id, traits)
    elif message.tool_call_id:
        raise _invalid(f"{where}.tool_call_id", "only messages of the role tool have tool_call_id")
    if message.name:
        found["name"] = message.name
    if message.reasoning:
        # Templates use either name.
        found["reasoning_content"] = found["reasoning"] = message.reasoning
        # Templates of the harmony format refuse calls with both text and reasoning.
        if traits.is_harmony and not (message.content and message.tool_calls):
            found["thinking"] = message.reasoning
    return found


def _call(call: ToolCall, where: str, traits: TemplateTraits) -> dict[str, Any]:
    text = call.arguments if call.arguments.strip() not in ("", "null") else "{}"
    arguments = _json_object(text, f"{where}.function.arguments")
    return {
        "id": _call_id(call.call_id, traits),
        "type": "function",
        "function": {
            "name": call.name,
            "arguments": text if traits.has_text_arguments else arguments,
        },
    }


def _call_id(call_id: str, traits: TemplateTraits) -> str:
    return to_short_call_id(call_id) if traits.has_short_ids else call_id


def template_variables(prompt: ChatPrompt, traits: TemplateTraits) -> dict[str, Any]:
    """Return the variables of a template with these traits, beyond the messages: tools, settings of
    reasoning, and those that the client sets. Raises InvalidRequestError."""
    found = _client_variables(prompt.template_variables)
    effort = prompt.reasoning_effort
    if effort is not None:
        if effort not in REASONING_EFFORTS:
            raise _invalid(
                "reasoning_effort",
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}, got {effort!r}",
            )
        known = _HARMONY_EFFORTS.get(effort, effort) if traits.is_harmony else effort
        found.setdefault("reasoning_effort", known)
        if effort == "none":
            # The names that templates of Qwen, and of DeepSeek and Granite, read.
            found.setdefault("enable_thinking", False)
            found.setdefault("thinking", False)
    check_tools(prompt.tools)
    if has_rendered_tools(prompt):
        found["tools"] = [
            _tool(tool, index, traits) for index, tool in enumerate(prompt.tools.tools)
        ]
    return found


def has_rendered_tools(prompt: ChatPrompt) -> bool:
    """Return whether the template gets tools. With the tool choice none, they are left out."""
    return bool(prompt.tools.tools) and prompt.tools.choice is not ToolChoiceMode.NONE


def _client_variables(text: str) -> dict[str, Any]:
    where = "chat_template_kwargs"
    if not text:
        return {}
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_TEMPLATE_VARIABLES_BYTES:
        raise _invalid(
            where, f"{where} must have at most {MAX_TEMPLATE_VARIABLES_BYTES} bytes, has {size}"
        )
    found = _json_object(text, where)
    for name in found:
        if name in _SERVER_VARIABLES or not name.isidentifier():
            raise _invalid(
                where,
                f"{where} cannot set {name[:64]!r}: names must be identifiers other than "
                f"{', '.join(sorted(_SERVER_VARIABLES))}",
            )
    return found


def check_tools(options: ToolOptions) -> None:
    """Raise InvalidRequestError if the names of tools are not valid and distinct, or if the choice
    does not fit the tools."""
    tools = options.tools
    if len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"at most {MAX_TOOLS} tools are allowed, got {len(tools)}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function.name"
        if not TOOL_NAME.fullmatch(tool.name):
            raise _invalid(
                where,
                "a tool's name must have 1 to 64 letters, digits, underscores and dashes, got "
                f"{tool.name[:80]!r}",
            )
        if tool.name in names:
            raise _invalid(where, f"two tools have the name {tool.name!r}")
        names.add(tool.name)
    if options.choice is ToolChoiceMode.NAMED and options.named not in names:
        raise _invalid("tool_choice", f"tool_choice names {options.named[:80]!r}, which is no tool")
    if options.choice is ToolChoiceMode.REQUIRED and not tools:
        raise _invalid("tool_choice", "tool_choice is required, but there are no tools")


def _tool(tool: Tool, index: int, traits: TemplateTraits) -> dict[str, Any]:
    where = f"tools[{index}].function.parameters"
    parameters = _json_object(tool.parameters, where) if tool.parameters else None
    function: dict[str, Any] = {"name": tool.name}
    if tool.description or traits.is_harmony:
        # Templates of the harmony format write the description without checking that there is one.
        function["description"] = tool.description
    # Templates iterate over the properties of tools without checking that there are some.
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        return parse_json_object(text)
    except ValueError as error:
        raise _invalid(where, f"{where} {error}") from None


def _invalid(param: str, message: str) -> InvalidRequestError:
    reason = "INVALID_TOOLS" if param.startswith("tool") else "INVALID_REQUEST"
    return InvalidRequestError(message, reason=reason, param=param)
