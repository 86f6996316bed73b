"""Chat rendering with messages as plain text: only the template writes special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.text.chat import ChatTemplate
from outrider.text.special_tokens import SpecialTokens

_USER, _ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_SYSTEM = {"role": "system", "content": "c"}
_SAMPLES = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ANSWER, _USER),
    (_SYSTEM, _USER, _ANSWER, _USER),
)
"""Conversations that show how a template writes its special tokens."""
_ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
"""Roles of the API's own; any other one is a text of the client's choice."""


class PlainChat:
    """A chat template that writes private names where it wrote special tokens.

    The names are put into the template's source, not into its result: a special token's string in
    the result is from a client then, even where the template cuts, trims or joins what clients
    sent. Templates that build special tokens out of parts (`'<|' + role + '|>'`) cannot be treated
    so; for these the strings of special tokens in messages are hidden before rendering.
    """

    def __init__(
        self, source: str, names: Mapping[str, str], tokens: SpecialTokens, usual: ChatTemplate
    ) -> None:
        """`source` and `names` (`bos_token` and others to their text) are those of `usual`."""
        self._tokens = tokens
        self._template = usual
        self._is_marked = False
        try:
            marked = ChatTemplate(
                tokens.mark(source), {name: tokens.mark(text) for name, text in names.items()}
            )
        except InvalidRequestError:
            # A special token whose string is part of the template's own syntax.
            return
        results = [_render(marked, sample) for sample in _SAMPLES]
        if [tokens.unmark(text) for text in results] == [_render(usual, s) for s in _SAMPLES]:
            self._template = marked
            self._is_marked = not any(map(tokens.contains_string, results))

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The conversation as text, with private names for the template's special tokens;
        `options` are those of `ChatTemplate.render`.

        Raises InvalidRequestError if the template refuses the messages.
        """
        if self._is_marked:
            return self._template.render(messages, **options)
        hidden = [
            {key: self._hide(key, text) for key, text in message.items()} for message in messages
        ]
        return self._tokens.mark(self._template.render(hidden, **options))

    def _hide(self, key: str, text: str) -> str:
        return text if key == "role" and text in _ROLES else self._tokens.hide(text)


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the rendered conversation, or the error with which the template refuses it."""
    try:
        return template.render(messages)
    except InvalidRequestError as error:
        return error.message
