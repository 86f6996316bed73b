"""Hides the texts of special tokens from the grammar library.

The library tokenizes a literal as the tokenizer would. A literal with the text of a special token,
such as `<|im_end|>`, would therefore become that control token and end the answer too early. If the
special tokens have random texts instead, the literal becomes ordinary tokens.
"""

from __future__ import annotations

import json
import secrets
from typing import Any


def hide_special_tokens(tokenizer_json: str) -> str:
    """Return the content of a tokenizer.json with the text of each special token replaced by a
    random text. The ids stay the same. Raises ValueError if `tokenizer_json` is not a JSON
    object."""
    tokenizer = json.loads(tokenizer_json)
    if not isinstance(tokenizer, dict):
        raise ValueError("tokenizer.json must be an object")
    prefix = secrets.token_hex(8)
    names: dict[str, str] = {}
    for token in tokenizer.get("added_tokens") or ():
        if token.get("special"):
            names[token["content"]] = token["content"] = f"special-{prefix}-{token['id']}"
    # A tokenizer without a model is for the library to refuse.
    model = tokenizer.get("model")
    if isinstance(model, dict):
        _rename_in_model(model, names)
    return json.dumps(tokenizer)


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        for old, new in names.items():
            if old in vocabulary:
                vocabulary[new] = vocabulary.pop(old)
    elif isinstance(vocabulary, list):
        # Unigram: texts with their scores.
        for entry in vocabulary:
            entry[0] = names.get(entry[0], entry[0])
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        model["unk_token"] = names.get(unknown, unknown)
