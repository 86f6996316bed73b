"""Traits of chat templates: in which form a template reads tools, tool calls and reasoning.

Published templates differ in ways that no file of the model declares. They are found here by
rendering a sample conversation in each form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import InvalidRequestError
from outrider.text.chat import ChatTemplate
from outrider.text.output_parsers.harmony import CHANNEL

_NAME: Final = "sample_tool"
_ARGUMENTS: Final = {"sample_key": "sample_value"}
_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "sample",
        "parameters": {
            "type": "object",
            "properties": {"sample_key": {"type": "string", "description": "sample"}},
            "required": ["sample_key"],
        },
    },
}
_SHORT_ID: Final = "sample123"
"""Templates of Mistral models demand 9 letters and digits."""
_LONG_ID: Final = "call_0123456789abcdef"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """Form in which a chat template reads messages and tools."""

    renders_tools: bool = False
    """Whether the template has a variable `tools`."""
    has_text_arguments: bool = False
    """Whether the arguments of tool calls must be JSON texts, as in templates of DeepSeek. Other
    templates need objects."""
    has_null_content: bool = False
    """Whether a message with tool calls and without text must have the content None. Other
    templates need an empty text."""
    has_short_ids: bool = False
    """Whether ids of tool calls must have 9 letters and digits, as in templates of Mistral."""
    has_single_calls: bool = False
    """Whether a message may have only one tool call, as in templates of Llama 3."""
    is_harmony: bool = False
    """Whether the template writes OpenAI's harmony format (gpt-oss): it reads the reasoning of a
    message from `thinking`, and knows the reasoning efforts low, medium and high only."""


def find_traits(source: str, template: ChatTemplate) -> TemplateTraits:
    """Return the traits of a template. `source`: its text. A template that refuses every sample
    gets arguments as objects and content as text."""
    found = next(
        (
            (call_id, form)
            for form in _FORMS
            for call_id in (_LONG_ID, _SHORT_ID)
            if _renders_calls(template, [call_id], *form)
        ),
        None,
    )
    ids, (has_text, has_null) = found or (_LONG_ID, _FORMS[0])
    two_ids = [f"{ids[:-1]}{last}" for last in "12"]
    return TemplateTraits(
        renders_tools="tools" in template.variables,
        has_text_arguments=has_text,
        has_null_content=has_null,
        has_short_ids=ids == _SHORT_ID,
        has_single_calls=found is not None
        and not _renders_calls(template, two_ids, has_text, has_null),
        is_harmony=CHANNEL in source,
    )


_FORMS: Final = ((False, False), (True, False), (False, True), (True, True))
"""Values of `has_text_arguments` and `has_null_content`, the most frequent ones first."""


def _renders_calls(
    template: ChatTemplate, call_ids: Sequence[str], has_text: bool, has_null: bool
) -> bool:
    """Return whether a template writes the calls of a sample conversation, which have these ids, as
    JSON, or in a format of its own, but not as Python's text of a dictionary and not as a JSON text
    inside a string."""
    arguments = json.dumps(_ARGUMENTS)
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": _NAME, "arguments": arguments if has_text else _ARGUMENTS},
        }
        for call_id in call_ids
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "sample"},
        {"role": "assistant", "content": None if has_null else "", "tool_calls": calls},
        *(
            {"role": "tool", "content": "sample", "tool_call_id": call_id, "name": _NAME}
            for call_id in call_ids
        ),
    ]
    try:
        # Without the tool's definition, which holds the same names.
        text = template.render(messages)
    except InvalidRequestError:
        try:
            text = template.render(messages, variables={"tools": [_TOOL]})
        except InvalidRequestError:
            return False
    if has_text:
        return arguments in text
    return "sample_value" in text and str(_ARGUMENTS) not in text
