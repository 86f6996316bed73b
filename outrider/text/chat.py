"""Chat templates: jinja2 in a sandbox, with the helpers that published templates rely on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidRequestError
from outrider.text.generation_block import GenerationBlock


class ChatTemplate:
    """A compiled chat template. A default system message is the template's own business."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names such as `bos_token` to their text.

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
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequestError(
                f"the chat template does not compile: {error}", reason="BAD_CHAT_TEMPLATE"
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ending where the assistant's answer begins.

        Raises InvalidRequestError if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"the chat template refused the conversation: {error}", reason="BAD_CHAT"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=False, indent=indent)
