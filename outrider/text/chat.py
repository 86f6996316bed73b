"""Chat templates: sandboxed jinja2, with the helpers that published templates rely on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidRequestError
from outrider.text.generation_block import GenerationBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options that determine how the rendered text of a conversation ends. Raises
    InvalidRequestError if both are true."""

    add_generation_prompt: bool = True
    """Whether the text ends where the assistant's next answer begins."""
    continue_final_message: bool = False
    """Whether the text ends with the content of the last message, which the model continues."""

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                reason="BAD_CHAT",
            )


NO_VARIABLES: Mapping[str, Any] = {}
"""No variables of a chat template beyond those that the server sets."""
NEXT_ANSWER = ChatOptions()
"""Options for a text that ends where the assistant's next answer begins."""


class ChatTemplate:
    """A compiled chat template. No system message is added, except by the template itself."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. `special_tokens` maps names such as `bos_token` to their texts.

        Raises InvalidRequestError if `source` is not a template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = _tojson
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(parsed)
        except TemplateError as error:
            raise InvalidRequestError(
                f"the chat template does not compile: {error}", reason="BAD_CHAT_TEMPLATE"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.variables = frozenset(name.name for name in parsed.find_all(nodes.Name))
        """Names of all variables in the template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions = NEXT_ANSWER,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the conversation as text.

        Messages and `variables` hold values of JSON's types. `variables` are more variables of the
        template, such as `tools` and `enable_thinking`; they cannot replace those that the server
        sets.

        Raises InvalidRequestError if the template refuses the messages, or if the last message is
        to be continued and does not appear in the text.
        """
        if not options.continue_final_message:
            return self._render(
                messages, variables, add_generation_prompt=options.add_generation_prompt
            )
        *earlier, last = messages
        # Nobody can guess it, so no message holds it.
        mark = f"{secrets.token_hex(16)} "
        marked = {**last, "content": (last["content"] or "") + mark}
        text = self._render([*earlier, marked], variables, add_generation_prompt=False)
        before, found, after = text.rpartition(mark.rstrip())
        if not found:
            raise InvalidRequestError(
                "the chat template does not write the last message as it is: it cannot be "
                "continued",
                reason="BAD_CHAT",
            )
        # A template that strips messages has dropped the mark's space, and strips this one, too.
        return before if after.startswith(" ") else before.rstrip()

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        own = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render({**variables, **own})
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"the chat template refused the conversation: {error}",
                reason="BAD_CHAT",
                param="messages",
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
