"""Refuses OpenAI and vLLM request fields that would change an answer but are not supported.

A request that sets one is refused, because its answer would differ from the one asked for. Null
and no-op values are accepted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outrider.errors import InvalidRequestError

UnsupportedFields = Mapping[str, tuple[object, ...]]
"""By field: values beside null that ask for nothing."""

_BOTH: Final[dict[str, tuple[object, ...]]] = {
    # OpenAI's.
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
    # vLLM's: what is sampled.
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # What it is made of.
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    # Which form it has.
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    # What is told of it.
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
CHAT: Final[UnsupportedFields] = {
    **_BOTH,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
}
TOKENIZED_CHAT: Final[UnsupportedFields] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "tools": ([],),
}
"""Of a conversation that is to be tokenized: these would change its tokens."""
MESSAGE: Final[UnsupportedFields] = {
    "audio": (),
    "function_call": (),
    "function_calls": ([],),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""Of a turn of a conversation."""
STRUCTURE: Final[UnsupportedFields] = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": (False,),
    "structural_tag": (),
    "whitespace_pattern": (),
}
"""Of `structured_outputs`."""


class UnsupportedFieldError(InvalidRequestError):
    """A field that would change the answer; `param` is its name."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, reason="UNSUPPORTED", param=param)


def refuse_unsupported(
    extra: Mapping[str, object] | None, fields: UnsupportedFields, where: str = ""
) -> None:
    """Raise UnsupportedFieldError for one of `fields` that would change the answer; `where` stands
    before its name."""
    for name, value in (extra or {}).items():
        harmless = fields.get(name)
        if harmless is None or value is None or value in harmless:
            continue
        allowed = " or ".join(["null", *(repr(each) for each in harmless)])
        raise UnsupportedFieldError(
            f"{where}{name} is not supported here; it may be {allowed}", param=f"{where}{name}"
        )
