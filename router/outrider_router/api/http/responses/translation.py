"""Translates the body of POST /v1/responses into a router request, and into the members of a
response that repeat it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.errors import InvalidRequestError, OutriderError
from outrider.ids import RequestId
from outrider.spec.structured_output import StructuredKind, StructuredOutput
from outrider.spec.tools import ToolOptions
from outrider.wire.inference import (
    MAX_CHAT_MESSAGES,
    MAX_PROMPT_BYTES,
    ChatPrompt,
    GenerateRequest,
)
from outrider_router.api.http.request_translation import (
    DEFAULT_TEMPERATURE,
    sampling_options,
    speculation_options,
    stopping_options,
    template_variables_text,
    tool_options,
)
from outrider_router.api.http.responses.input_items import PREVIOUS, Conversation
from outrider_router.api.http.responses.request_models import (
    CreateResponseRequest,
    JsonSchemaFormat,
    NamedFunctionChoice,
    ResponseFunctionTool,
    UnsupportedObject,
)
from outrider_router.api.http.responses.store import Turn
from outrider_router.api.http.unsupported_fields import (
    FUNCTION_TOOL,
    RESPONSE,
    RESPONSE_REASONING,
    RESPONSE_TEXT,
    UnsupportedFieldError,
    refuse_unsupported,
)

_FIELDS: Final = {
    "max_tokens": "max_output_tokens",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "structured_outputs": "text.format",
}
"""Fields of router requests that have other names in the body."""
_TOOL_PATH: Final = re.compile(r"(tools\[\d+\])\.function\b")


def check_supported(body: CreateResponseRequest) -> None:
    """Raise UnsupportedFieldError if a body has a field that is not supported. Input items are
    checked when they are listed."""
    refuse_unsupported(body.model_extra, RESPONSE)
    if body.text is not None:
        refuse_unsupported(body.text.model_extra, RESPONSE_TEXT, "text.")
    if body.reasoning is not None:
        refuse_unsupported(body.reasoning.model_extra, RESPONSE_REASONING, "reasoning.")
    if "message.output_text.logprobs" in (body.include or ()):
        raise UnsupportedFieldError(
            "include does not support message.output_text.logprobs here", param="include"
        )
    if body.background and body.stream:
        raise UnsupportedFieldError(
            "stream is not supported here together with background; retrieve the response until "
            "it has ended",
            param="stream",
        )
    if isinstance(body.tool_choice, UnsupportedObject):
        raise UnsupportedFieldError(
            f"tool_choice of the type {body.tool_choice.type[:64]!r} is not supported here; it may "
            "be none, auto, required or a function",
            param="tool_choice",
        )
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, UnsupportedObject):
            raise UnsupportedFieldError(
                f"tools[{index}] has the type {tool.type[:64]!r}, which is not supported here; "
                "tools must be functions",
                param=f"tools[{index}]",
            )
        refuse_unsupported(tool.model_extra, FUNCTION_TOOL, f"tools[{index}].")


@dataclass(frozen=True, slots=True)
class TranslatedResponse:
    """A request for a response as the router serves it."""

    request: GenerateRequest
    conversation: Conversation

    def rename_error(self, error: OutriderError) -> OutriderError:
        """Return an error of the request with the name of the field in the body."""
        param = error.param
        name = self.conversation.field_name(param) or _FIELDS.get(param)
        name = name or _TOOL_PATH.sub(r"\1", param)
        if name == param:
            return error
        if name == PREVIOUS:
            message = f"the previous response cannot be continued: {error.message}"
        else:
            message = error.message.replace(param, name)
        return type(error)(
            message,
            reason=error.reason,
            retry_after_s=error.retry_after_s,
            param=name,
        )


def translate_response(
    body: CreateResponseRequest,
    previous: Sequence[Turn],
    new: Turn,
    request_id: RequestId | None,
) -> TranslatedResponse:
    """Translate a body whose input items are `new`, and which continues the conversation
    `previous`. Raises InvalidRequestError."""
    stored = [item for turn in previous for item in turn.items]
    items = [*stored, *new.items]
    num_bytes = new.num_bytes + sum(turn.num_bytes for turn in previous)
    if stored and (len(items) > MAX_CHAT_MESSAGES or num_bytes > MAX_PROMPT_BYTES):
        raise InvalidRequestError(
            f"the conversation has {len(items)} items of {num_bytes} bytes with the input; at most "
            f"{MAX_CHAT_MESSAGES} items of {MAX_PROMPT_BYTES} bytes may be continued",
            reason="PROMPT_TOO_LONG",
            param=PREVIOUS,
        )
    conversation = Conversation(body.instructions, items, num_stored=len(stored))
    prompt = ChatPrompt(
        conversation.messages,
        tools=_tools(body),
        template_variables=template_variables_text(body.chat_template_kwargs),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    request = GenerateRequest(
        prompt=prompt,
        request_id=request_id,
        model=body.model,
        sampling=sampling_options(body),
        stopping=stopping_options(body, body.max_output_tokens),
        speculation=speculation_options(body),
        priority=body.priority or 0,
        structured_output=_structured_output(body),
        skip_special_tokens=body.skip_special_tokens,
    )
    return TranslatedResponse(request, conversation)


def _tools(body: CreateResponseRequest) -> ToolOptions:
    choice = body.tool_choice
    return tool_options(
        [tool for tool in body.tools or () if isinstance(tool, ResponseFunctionTool)],
        mode=choice if isinstance(choice, str) else None,
        named=choice.name if isinstance(choice, NamedFunctionChoice) else None,
        parallel=body.parallel_tool_calls,
    )


def _structured_output(body: CreateResponseRequest) -> StructuredOutput | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, JsonSchemaFormat):
        return StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(wanted.schema_))
    if wanted is None or wanted.type == "text":
        return None
    return StructuredOutput(StructuredKind.JSON_OBJECT)


def response_members(
    body: CreateResponseRequest,
    *,
    response_id: str,
    model: str,
    created_at: int,
    is_stored: bool,
) -> dict[str, object]:
    """Return the members of a response that do not change while it is made. `created_at` is the
    time in seconds since 1970."""
    choice = body.tool_choice
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "service_tier": "default",
        "store": is_stored,
        "temperature": DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        "text": {"format": _format_member(body), "verbosity": "medium"},
        "tool_choice": {"type": "function", "name": choice.name}
        if isinstance(choice, NamedFunctionChoice)
        else choice or "auto",
        "tools": [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in body.tools or ()
            if isinstance(tool, ResponseFunctionTool)
        ],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _format_member(body: CreateResponseRequest) -> dict[str, object]:
    wanted = None if body.text is None else body.text.format
    if not isinstance(wanted, JsonSchemaFormat):
        return {"type": "text" if wanted is None else wanted.type}
    return {
        "type": "json_schema",
        "name": wanted.name,
        "description": wanted.description,
        "schema": wanted.schema_,
        "strict": wanted.strict,
    }
