"""Converts a GGUF file's tokenizer to `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from outrider.errors import InvalidRequestError

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
"""Values of tokenizer.ggml.token_type."""

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(metadata: Mapping[str, Any], target: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into the directory `target`.

    `metadata` is that of the GGUF file. Raises InvalidRequestError if its tokenizer is not a known
    byte-level BPE.
    """
    build_tokenizer(metadata).save(str(target / "tokenizer.json"))
    settings = json.dumps(tokenizer_settings(metadata), indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(settings + "\n", encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer, including its special tokens, from a GGUF file's metadata.

    Raises InvalidRequestError if the tokenizer is not a known byte-level BPE.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidRequestError(f"only byte-level BPE tokenizers are supported, not {kind!r}")
    style = str(metadata.get("tokenizer.ggml.pre", "default"))
    try:
        tokens: list[str] = list(metadata["tokenizer.ggml.tokens"])
        merges = [_merge(line) for line in metadata["tokenizer.ggml.merges"]]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for merges of unknown tokens
        raise InvalidRequestError(f"the GGUF has no usable tokenizer: {error}") from error
    tokenizer = Tokenizer(model)
    if style == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type") or ()
    for token, type_ in zip(tokens, types, strict=False):
        if type_ == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    tokenizer.post_processor = _post_processor(metadata, tokens)
    return tokenizer


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` for a GGUF file's metadata, with the special
    tokens (`eos_token` and others) and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(
            metadata.get(f"{metadata.get('general.architecture')}.context_length", 2048)
        ),
    }
    for role, key in _ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None and 0 <= index < len(tokens):
            settings[role] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
    return settings


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    if not left or not right:
        raise ValueError(f"odd merge {line!r}")
    return left, right


def _pre_tokenizer(style: str) -> Any:
    """Return the pre-tokenizer with this llama.cpp name."""
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if style in ("default", "gpt-2"):
        return byte_level
    if style == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}.get(style)
    if digits is None:
        raise InvalidRequestError(f"unknown pre-tokenizer {style!r} in the GGUF")
    split = pre.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token"):
        return byte_level
    template = processors.TemplateProcessing(
        single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], int(bos))]
    )
    return processors.Sequence([byte_level, template])
