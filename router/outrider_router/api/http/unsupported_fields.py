"""Refuses OpenAI and vLLM request fields that would change an answer but are not supported.

If such a field were ignored, the answer would differ from the one that the client asked for. Null
and no-op values are accepted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outrider.errors import InvalidRequestError

UnsupportedFields = Mapping[str, tuple[object, ...]]
"""Maps the name of an unsupported field to its harmless values. A request with null or a harmless
value in the field is accepted.
"""

_BOTH: Final[dict[str, tuple[object, ...]]] = {
    # OpenAI's fields.
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's fields for sampling.
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # vLLM's fields for the prompt.
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    # vLLM's fields for structured outputs.
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    # vLLM's fields for the response.
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
}
COMPLETION: Final[UnsupportedFields] = {
    **_BOTH,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}
_CHAT_FIELDS: Final = frozenset(
    {"tools", "tool_choice", "reasoning_effort", "include_reasoning", "thinking_token_budget"}
)
"""Fields that chats support and completions do not."""
CHAT: Final[UnsupportedFields] = {
    **{name: values for name, values in _BOTH.items() if name not in _CHAT_FIELDS},
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
}
TOKENIZED_CHAT: Final[UnsupportedFields] = {
    "chat_template": (),
    "documents": ([],),
}
"""Fields that /tokenize does not support for a conversation. They would change its tokens."""
MESSAGE: Final[UnsupportedFields] = {
    "audio": (),
    "function_call": (),
    "function_calls": ([],),
    "refusal": ("",),
}
"""Unsupported fields of a chat message."""
STRUCTURE: Final[UnsupportedFields] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""Unsupported fields of `structured_outputs`."""


_RESPONSE_FIELDS: Final = frozenset({"tools", "tool_choice"})
"""Fields that responses support under the same name as chats."""
RESPONSE: Final[UnsupportedFields] = {
    **{name: values for name, values in _BOTH.items() if name not in _RESPONSE_FIELDS},
    # OpenAI's fields of responses.
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    # Fields of chats.
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "n": (1,),
    "response_format": (),
    # vLLM's fields.
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "previous_input_messages": (),
    "return_token_ids": (False,),
    "structured_outputs": (),
}
"""Unsupported fields of a request for a response."""
RESPONSE_TEXT: Final[UnsupportedFields] = {"verbosity": ("medium",)}
"""Unsupported fields of `text` of a response."""
RESPONSE_REASONING: Final[UnsupportedFields] = {
    "context": ("auto",),
    "generate_summary": ("auto",),
    "mode": ("standard",),
    "summary": ("auto",),
}
"""Unsupported fields of `reasoning` of a response."""
REASONING_ITEM: Final[UnsupportedFields] = {"encrypted_content": ()}
"""Unsupported fields of an input item of the type reasoning."""
FUNCTION_TOOL: Final[UnsupportedFields] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}
"""Unsupported fields of a function among the tools of a response."""


class UnsupportedFieldError(InvalidRequestError):
    """Error of a request with an unsupported field, which would change the answer. `param` is the
    field's name.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, reason="UNSUPPORTED", param=param)


def refuse_unsupported(
    extra: Mapping[str, object] | None, fields: UnsupportedFields, where: str = ""
) -> None:
    """Raise UnsupportedFieldError if a field in `extra` is one of `fields` and its value would
    change the answer.

    `extra` has the fields of a body that its pydantic model does not define. `where` is put before
    the name of the field in the error, such as "messages[0].".
    """
    for name, value in (extra or {}).items():
        harmless = fields.get(name)
        if harmless is None or value is None or value in harmless:
            continue
        allowed = " or ".join(["null", *(repr(each) for each in harmless)])
        raise UnsupportedFieldError(
            f"{where}{name} is not supported here; it may be {allowed}", param=f"{where}{name}"
        )
