"""Tokenizer of a served model, loaded from files in the layout of the Hugging Face Hub.

The module does not import torch. It imports `tokenizers` when a tokenizer is loaded, so that
`tokenizer_hash` does not need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import InvalidRequestError, NotFoundError
from outrider.text.chat import NEXT_ANSWER, NO_VARIABLES, ChatOptions
from outrider.text.model_chat import SETTINGS_FILE, ModelChat, token_text
from outrider.text.template_traits import TemplateTraits
from outrider.text.token_bytes import TokenByteTable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

TOKENIZER_FILE = "tokenizer.json"
LONG_INPUT = 4_000
"""Number of characters or ids from which encoding or decoding takes milliseconds. Such work belongs
on a thread of its own, so that the event loop can continue."""
_PIECE_CHARS = 1 << 14
_MAX_CHARS_PER_TOKEN = 8
"""A text with at most this many characters per allowed token is encoded without a check of its
length."""
_MAX_EXCESS = 1.25
"""A text is refused if its pieces together have more tokens than this multiple of the limit plus
LONG_INPUT. The pieces' tokens differ from those of the whole text only at the cuts, by a few of the
hundreds of tokens in a piece."""


def tokenizer_hash(path: str | Path) -> str:
    """Return the SHA-256 (hexadecimal) of the bytes of tokenizer.json, or an empty text if there is
    no such file. Peers treat the empty text as unknown.

    `path` is that file, the model directory that contains it, or a weight file in the same
    directory.
    """
    file = tokenizer_file(path)
    if not file.is_file():
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def tokenizer_file(path: str | Path) -> Path:
    """Return the path of tokenizer.json for a model directory, a weight file or the file itself."""
    path = Path(path)
    if path.name == TOKENIZER_FILE:
        return path
    return (path if path.is_dir() else path.parent) / TOKENIZER_FILE


class Tokenizer:
    """Tokenizer, chat template and end-of-turn ids of a model. Thread-safe."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        hash_hex: str,
        chat: ModelChat | None,
        eos_ids: tuple[int, ...],
        file: Path | None = None,
    ) -> None:
        self._fast = fast
        self._chat = chat
        self.hash = hash_hex
        """sha256 of tokenizer.json, hexadecimal."""
        self.eos_ids = eos_ids
        """Ids that end the model's turn, ascending."""
        self.template_source = "" if chat is None else chat.source
        """Sources of the chat templates; "" if the model has none."""
        self.file = file
        """The tokenizer.json from which the tokenizer was read, or None."""
        self.num_ids = 1 + max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id; the vocabulary of a target may be padded beyond it."""
        self.pieces = TokenByteTable.from_tokenizer(fast)
        """Bytes that each id contributes to the text."""
        self._byte_tables: dict[tuple[str, ...], TokenByteTable] = {}
        self.special_pieces = self.pieces.including_special()
        """Bytes of each id in texts that include special tokens."""

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory (or the path of tokenizer.json).

        Raises NotFoundError if there is no tokenizer.json, InvalidRequestError for a broken file,
        and FailedPreconditionError for a decoder that cannot be streamed.
        """
        from tokenizers import Tokenizer as FastTokenizer

        file = tokenizer_file(path)
        if not file.is_file():
            raise NotFoundError(f"no {TOKENIZER_FILE} in {file.parent}", reason="NO_TOKENIZER")
        raw = file.read_bytes()
        try:
            fast = FastTokenizer.from_buffer(raw)
        except Exception as error:  # the library raises bare Exception for every defect
            raise InvalidRequestError(
                f"{file} is not a tokenizer: {error}", reason="BAD_TOKENIZER"
            ) from error
        fast.no_truncation()
        fast.no_padding()
        settings = _read_json(file.with_name(SETTINGS_FILE))
        return cls(
            fast,
            hash_hex=hashlib.sha256(raw).hexdigest(),
            chat=ModelChat.load(file.parent, settings, raw, fast),
            eos_ids=_eos_ids(fast, file.parent, settings),
            file=file,
        )

    def special_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Return the ids of those of `texts` that are special tokens, by text."""
        added = self._fast.get_added_tokens_decoder()
        return {
            token.content: id_
            for id_, token in added.items()
            if token.special and token.content in texts
        }

    def bytes_with(self, texts: tuple[str, ...]) -> TokenByteTable:
        """Return the table of pieces in which those special tokens that are `texts` have their
        text, too."""
        if texts not in self._byte_tables:
            ids = self.special_ids(texts).values()
            self._byte_tables[texts] = self.pieces.including_special(ids) if ids else self.pieces
        return self._byte_tables[texts]

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._chat is not None

    def template_traits(self, *, with_tools: bool) -> TemplateTraits:
        """Return the form in which the chat template for requests with or without tools reads
        messages. A model without a template has the usual traits."""
        return TemplateTraits() if self._chat is None else self._chat.traits(with_tools=with_tools)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of `text`. With `add_special_tokens`, they include ids such as BOS
        that the tokenizer adds to a document.

        Raises InvalidRequestError (PROMPT_TOO_LONG) for a text with far more than `max_tokens`
        tokens. The time until then depends on `max_tokens`, but not on the length of the text. A
        text that exceeds `max_tokens` slightly is encoded.
        """
        if len(text) <= LONG_INPUT:
            return tuple(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        if max_tokens is not None and len(text) > _MAX_CHARS_PER_TOKEN * max_tokens:
            self._check_length(text, max_tokens)
        return self._encode_long(text, add_special_tokens)

    def _encode_long(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # The same ids; but the call for one text holds up all other threads, the one for many none.
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise InvalidRequestError if `text` has far more than `max_tokens` tokens."""
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(self._encode_long(text[start : start + _PIECE_CHARS], False))
            if count > _MAX_EXCESS * max_tokens + LONG_INPUT:
                raise InvalidRequestError(
                    f"the prompt has more than {max_tokens} tokens, which is the most that the "
                    "context holds",
                    reason="PROMPT_TOO_LONG",
                    param="prompt",
                )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: ChatOptions = NEXT_ANSWER,
        variables: Mapping[str, Any] = NO_VARIABLES,
        parse_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation. Each message has "role" and "content", and
        perhaps other members. `options` are explained in `ChatOptions`, and `variables` at
        `ChatTemplate.render`.

        The template writes its own special tokens and its own default system message. The string of
        a special token in a message is encoded as ordinary text. With `parse_special_tokens` it is
        encoded as the special token. A conversation without such strings has the same ids in both
        cases. `max_tokens` is as in `encode`. Raises InvalidRequestError if the model has no
        template or the template refuses the messages.
        """
        chat = self._chat
        if chat is None:
            raise InvalidRequestError(
                "this model has no chat template; send a text or token-id prompt",
                reason="NO_CHAT_TEMPLATE",
                param="messages",
            )
        if parse_special_tokens:
            text = chat.render(messages, options=options, variables=variables)
            return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        tokens = chat.tokens
        text = chat.render_plain(messages, options=options, variables=variables)
        ids = self.encode(tokens.unmark(text), add_special_tokens=False, max_tokens=max_tokens)
        if [id_ for id_ in ids if id_ in tokens.ids] == tokens.marked_ids(text):
            return ids
        return tokens.encode(text)

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the complete text of `token_ids`, with special tokens only if `with_special` is
        set."""
        ids, skip = list(token_ids), not with_special
        if len(ids) <= LONG_INPUT:
            return self._fast.decode(ids, skip_special_tokens=skip)
        (text,) = self._fast.decode_batch([ids], skip_special_tokens=skip)
        return text

    def token_name(self, token_id: int) -> str:
        """Return the name of a token id in the vocabulary, or an empty text if the vocabulary does
        not contain the id."""
        return self._fast.id_to_token(token_id) or ""


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidRequestError(f"{file} is not JSON: {error}", reason="BAD_TOKENIZER") from error
    return content if isinstance(content, dict) else {}


def _eos_ids(fast: FastTokenizer, directory: Path, settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return every id that any of the model's files names as an end of turn.

    Raises InvalidRequestError for ids outside the vocabulary of config.json.
    """
    found: set[int] = set()
    vocab_size = _read_json(directory / "config.json").get("vocab_size")
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
        for each in ids:
            if each < 0 or (isinstance(vocab_size, int) and each >= vocab_size):
                raise InvalidRequestError(
                    f"{directory / name}: eos_token_id must be of token ids below vocab_size "
                    f"({vocab_size}), not {each}",
                    reason="BAD_TOKENIZER",
                )
        found.update(ids)
    text = token_text(settings.get("eos_token"))
    from_text = fast.token_to_id(text) if text is not None else None
    if from_text is not None:
        found.add(from_text)
    return tuple(sorted(found))
