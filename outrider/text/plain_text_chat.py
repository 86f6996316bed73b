"""Chat rendering in which messages are plain text, and only the template writes special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidRequestError
from outrider.text.chat import NEXT_ANSWER, NO_VARIABLES, ChatOptions, ChatTemplate
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
"""Roles that the API defines. Any other role is text from the client."""


class PlainChat:
    """Chat template whose special tokens clients cannot imitate in their messages.

    The source of the template is changed: in the place of each special token, it writes a private
    name that no client knows. If the rendered prompt still contains the string of a special token,
    a client has sent it, and it is encoded as plain text. Some templates build special tokens from
    parts, such as `'<|' + role + '|>'`. For these, the strings of special tokens in messages are
    replaced by placeholders before the template is rendered.
    """

    def __init__(
        self, source: str, names: Mapping[str, str], tokens: SpecialTokens, usual: ChatTemplate
    ) -> None:
        """Create a chat template.

        `usual` is the compiled template and `source` its source. `names` maps names such as
        `bos_token` to the texts of special tokens. `tokens` gives special tokens their private
        names.
        """
        self.source = source
        """Source of the template."""
        self.template = usual
        """The unchanged template."""
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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions = NEXT_ANSWER,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Return the conversation as text, with private names for the template's special tokens;
        the arguments are those of `ChatTemplate.render`.

        Raises InvalidRequestError if the template refuses the messages.
        """
        if self._is_marked:
            return self._template.render(messages, options=options, variables=variables)
        hidden = [
            {key: self._hide_field(key, value) for key, value in message.items()}
            for message in messages
        ]
        return self._tokens.mark(
            self._template.render(hidden, options=options, variables=self._hide(variables))
        )

    def _hide_field(self, key: str, value: Any) -> Any:
        return value if key == "role" and value in _ROLES else self._hide(value)

    def _hide(self, value: Any) -> Any:
        """Return a value of JSON's types with placeholders for special tokens in its strings."""
        match value:
            case str():
                return self._tokens.hide(value)
            case Mapping():
                return {self._tokens.hide(key): self._hide(each) for key, each in value.items()}
            case list() | tuple():
                return [self._hide(each) for each in value]
            case _:
                return value


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the rendered conversation, or the error with which the template refuses it."""
    try:
        return template.render(messages)
    except InvalidRequestError as error:
        return error.message
