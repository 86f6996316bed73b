"""Fields of OpenAI's and vLLM's APIs that would change an answer and that Outrider has not.

A request that sets one is refused: an answer without it would be another one than was asked for.
Values that ask for nothing are let through. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from outrider.errors import InvalidRequestError

HARMLESS: Final[dict[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "function_calls": ([],),
    "tool_calls": ([],),
    "tool_call_id": (),
    "truncate_prompt_tokens": (),
}
"""By field: values beside null that ask for nothing."""


def refuse_unsupported(extra: Mapping[str, object] | None, where: str = "") -> None:
    """Raise InvalidRequestError (UNSUPPORTED) for a field that would change the answer."""
    for name, value in (extra or {}).items():
        harmless = HARMLESS.get(name)
        if harmless is None or value is None or value in harmless:
            continue
        allowed = " or ".join(["null", *(repr(each) for each in harmless)])
        raise InvalidRequestError(
            f"{where}{name} is not supported here; it may be {allowed}", reason="UNSUPPORTED"
        )
