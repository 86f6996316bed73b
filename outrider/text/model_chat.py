"""Chat templates of a model: the usual one, and one for requests with tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import InvalidRequestError
from outrider.text.chat import ChatOptions, ChatTemplate
from outrider.text.plain_text_chat import PlainChat
from outrider.text.special_tokens import SpecialTokens
from outrider.text.template_traits import TemplateTraits, find_traits

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

SETTINGS_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
TOOL_TEMPLATE_FILE: Final = "additional_chat_templates/tool_use.jinja"
SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_DEFAULT, _TOOL_USE = "default", "tool_use"
"""Names of templates in a list of `tokenizer_config.json`."""


class ModelChat:
    """Chat templates of a model. Thread-safe."""

    def __init__(self, chats: Mapping[str, PlainChat], tokens: SpecialTokens) -> None:
        """Create the chat of a model.

        `chats` has the templates by their names in the model's files: "default", and perhaps
        "tool_use", which is used for requests with tools. `tokens`: special tokens of the model's
        tokenizer.
        """
        self._chats = dict(chats)
        self._traits = {
            name: find_traits(chat.source, chat.template) for name, chat in chats.items()
        }
        self.tokens = tokens
        self.source = "\n".join(chat.source for chat in chats.values())
        """Sources of all templates, joined."""

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], raw: bytes, fast: FastTokenizer
    ) -> ModelChat | None:
        """Read the templates of a model directory; None if there are none.

        `settings`: content of tokenizer_config.json. `raw`: content of tokenizer.json, from which
        `fast` was made. Raises InvalidRequestError for a template that does not compile, and if the
        special tokens have no ids of their own.
        """
        sources = _template_sources(directory, settings)
        if _DEFAULT not in sources:
            return None
        texts = {name: token_text(settings.get(name)) for name in SPECIAL_NAMES}
        names = {name: text for name, text in texts.items() if text is not None}
        templates: dict[str, ChatTemplate] = {}
        for name, (file, source) in sources.items():
            try:
                templates[name] = ChatTemplate(source, names)
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"{file}: {error.message}", reason=error.reason
                ) from error
        tokens = SpecialTokens(raw)
        tokens.check_ids(fast)
        return cls(
            {
                name: PlainChat(sources[name][1], names, tokens, template)
                for name, template in templates.items()
            },
            tokens,
        )

    def traits(self, *, with_tools: bool) -> TemplateTraits:
        """Return the traits of the template for requests with or without tools."""
        return self._traits[self._name(with_tools)]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions,
        variables: Mapping[str, Any],
    ) -> str:
        """Return a conversation as text with the usual strings of special tokens; the arguments
        are those of `ChatTemplate.render`. Raises InvalidRequestError."""
        template = self._chats[self._name("tools" in variables)].template
        return template.render(messages, options=options, variables=variables)

    def render_plain(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions,
        variables: Mapping[str, Any],
    ) -> str:
        """Return a conversation as text with private names for the template's special tokens, as
        `PlainChat.render` does. Raises InvalidRequestError."""
        chat = self._chats[self._name("tools" in variables)]
        return chat.render(messages, options=options, variables=variables)

    def _name(self, with_tools: bool) -> str:
        return _TOOL_USE if with_tools and _TOOL_USE in self._chats else _DEFAULT


def token_text(value: object) -> str | None:
    """Return the text of a special token in tokenizer_config.json; None if it has none."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Return the file and the source of each template by name. The files of templates take
    precedence over tokenizer_config.json."""
    file = directory / SETTINGS_FILE
    found: dict[str, tuple[Path, str]] = {}
    source: Any = settings.get("chat_template")
    if isinstance(source, str):
        found[_DEFAULT] = (file, source)
    elif isinstance(source, list):
        for entry in source:
            if isinstance(entry, dict) and entry.get("name") in (_DEFAULT, _TOOL_USE):
                template = entry.get("template")
                if isinstance(template, str):
                    found[entry["name"]] = (file, template)
    for name, path in ((_DEFAULT, TEMPLATE_FILE), (_TOOL_USE, TOOL_TEMPLATE_FILE)):
        file = directory / path
        if file.is_file():
            try:
                found[name] = (file, file.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise InvalidRequestError(
                    f"{file} is not UTF-8 text", reason="BAD_CHAT_TEMPLATE"
                ) from error
    return found
