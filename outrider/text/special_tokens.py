"""Private names for the special tokens of a tokenizer. No text of a client can contain them."""

from __future__ import annotations

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from outrider.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_NAME_BEGIN, _HIDDEN_BEGIN, _END = "\U000f0000", "\U000f0001", "\U000f0002"
"""Private-use characters: no case, no whitespace, and none of JSON's or jinja's own."""
_NONCE_BITS: Final = 96


class SpecialTokens:
    """A copy of a tokenizer in which every special token has a private name.

    For the copy, the usual strings of special tokens (`<|im_end|>`) are ordinary text, and only
    private names become special ids. The ids of both tokenizers are the same. Names contain a
    random number, so clients cannot guess them.
    """

    def __init__(self, raw: bytes) -> None:
        """Create the copy of a tokenizer. `raw` is the content of its tokenizer.json. Raises
        InvalidRequestError (BAD_TOKENIZER) if the special tokens cannot be renamed."""
        document: dict[str, Any] = json.loads(raw)
        added = document.get("added_tokens") or []
        self._strings = [
            token["content"] for token in added if token.get("special") and token["content"]
        ]
        nonce = secrets.randbits(_NONCE_BITS)
        numbers = range(len(self._strings))
        self._names = [f"{_NAME_BEGIN}{nonce}-{number}{_END}" for number in numbers]
        self._hidden = [f"{_HIDDEN_BEGIN}{nonce}-{number}{_END}" for number in numbers]
        self._number = {string: number for number, string in enumerate(self._strings)}
        longest_first = sorted(self._strings, key=len, reverse=True)
        # `(?!)` matches nothing: a tokenizer without special tokens has nothing to rename.
        self._string = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._name = re.compile(f"{_NAME_BEGIN}{nonce}-([0-9]+){_END}")
        self._any = re.compile(f"[{_NAME_BEGIN}{_HIDDEN_BEGIN}]{nonce}-([0-9]+){_END}")
        self._concealed = re.compile(f"{_HIDDEN_BEGIN}{nonce}-([0-9]+){_END}")
        self._fast = _renamed(document, dict(zip(self._strings, self._names, strict=True)))
        ids = [self._fast.token_to_id(name) for name in self._names]
        self._ids = [-1 if id_ is None else id_ for id_ in ids]
        self.ids = frozenset(self._ids)
        """Ids of all special tokens."""

    def check_ids(self, fast: FastTokenizer) -> None:
        """Raise InvalidRequestError unless every special token has the same id in the copy as in
        `fast`, the original tokenizer."""
        if self._ids != [fast.token_to_id(string) for string in self._strings]:
            raise InvalidRequestError(
                "the special tokens of tokenizer.json have no ids of their own",
                reason="BAD_TOKENIZER",
            )

    def contains_string(self, text: str) -> bool:
        """Return whether `text` contains the usual string of a special token."""
        return self._string.search(text) is not None

    def mark(self, text: str) -> str:
        """Return `text` with private names in place of the strings of special tokens."""
        return self._string.sub(lambda found: self._names[self._number[found[0]]], text)

    def hide(self, text: str) -> str:
        """Return `text` with placeholders in place of the strings of special tokens. `mark` does
        not change placeholders; `encode` and `unmark` replace them by the strings."""
        return self._string.sub(lambda found: self._hidden[self._number[found[0]]], text)

    def unmark(self, text: str) -> str:
        """Return `text` with the strings of special tokens in place of the private names that
        `mark` wrote and of the placeholders that `hide` wrote."""
        return self._any.sub(self._string_of, text)

    def marked_ids(self, text: str) -> list[int]:
        """Return the ids of the private names in `text`, in order."""
        return [self._ids[int(number)] for number in self._name.findall(text)]

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text in which `mark` replaced special tokens. Private names become
        special ids, and everything else becomes ordinary ids. No BOS or similar ids are added."""
        shown = self._concealed.sub(self._string_of, text)
        # The call for one text would hold up all other threads.
        (found,) = self._fast.encode_batch_fast([shown], add_special_tokens=False)
        return tuple(found.ids)

    def _string_of(self, found: re.Match[str]) -> str:
        string: str = self._strings[int(found[1])]
        return string


def _renamed(document: dict[str, Any], names: dict[str, str]) -> FastTokenizer:
    """Return the tokenizer of tokenizer.json with the special tokens of `names` renamed.

    Raises InvalidRequestError (BAD_TOKENIZER).
    """
    from tokenizers import Tokenizer as FastTokenizer

    model = dict(document["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        if model.get("merges") and not names.keys().isdisjoint(vocabulary):
            # A merge that spells a special token would make its id out of ordinary text.
            model["merges"] = [merge for merge in model["merges"] if _spells_none(merge, names)]
        model["vocab"] = {names.get(piece, piece): id_ for piece, id_ in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        token | {"content": names[token["content"]], "normalized": False}
        if token["content"] in names and token.get("special")
        else token
        for token in document.get("added_tokens") or []
    ]
    renamed = document | {
        "model": model,
        "added_tokens": added,
        # What it would add names special tokens by their usual strings, and is never asked for.
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    try:
        return FastTokenizer.from_str(json.dumps(renamed))
    except Exception as error:  # the library raises bare Exception for every defect
        raise InvalidRequestError(
            f"the special tokens of tokenizer.json cannot be renamed: {error}",
            reason="BAD_TOKENIZER",
        ) from error


def _spells_none(merge: str | list[str], names: dict[str, str]) -> bool:
    """Return whether neither the parts nor the result of a merge is one of `names`."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return names.keys().isdisjoint((left, right, left + right))
