"""Tokenizers that are built from the metadata of a GGUF file."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from outrider.errors import InvalidRequestError
from outrider.models.gguf_tokenizer import build_tokenizer
from tests.unit.models.tiny import tokenizer_metadata


def tokenizer_of(style: str) -> Tokenizer:
    return build_tokenizer(tokenizer_metadata(style))


@pytest.mark.parametrize("style", ["smollm", "default", "qwen2", "llama-bpe"])
def test_tokenizers_round_trip_any_text(style: str) -> None:
    tokenizer = tokenizer_of(style)
    for text in (
        "Hello 2024!  x",
        "\n\n1. a\n\n  22",
        "  tabs\tand\r\n",
        "don't \u4f60\u597d \U0001f642",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm_digits_stand_alone_and_whitespace_before_them_stays_whole() -> None:
    assert tokenizer_of("smollm").encode("\n\n12.").tokens == ["\u010a\u010a", "1", "2", "."]
    # Without the digit split the last newline belongs to what follows.
    assert tokenizer_of("default").encode("\n\n12.").tokens == ["\u010a", "\u010a", "12", "."]
    assert tokenizer_of("qwen2").encode(" 12").tokens == ["\u0120", "1", "2"]


def test_special_tokens_are_single_ids_and_are_skipped_in_text() -> None:
    tokenizer = tokenizer_of("smollm")
    encoded = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert tokenizer.decode(encoded.ids) == "a"


def test_a_tokenizer_that_asks_for_a_bos_gets_one() -> None:
    metadata = {**tokenizer_metadata("llama-bpe"), "tokenizer.ggml.add_bos_token": True}
    assert build_tokenizer(metadata).encode("a").tokens == ["<|im_start|>", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "byte-level BPE"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "pre-tokenizer"),
        ({"tokenizer.ggml.merges": ["lonely"]}, "merge"),
        ({"tokenizer.ggml.merges": ["no pe"]}, "usable tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "usable tokenizer"),
    ],
)
def test_tokenizers_that_are_not_understood_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        build_tokenizer({**tokenizer_metadata("smollm"), **changes})
