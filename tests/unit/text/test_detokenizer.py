"""Incremental detokenizing equals decoding everything at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from outrider.errors import FailedPreconditionError
from outrider.text.detokenizer import Detokenizer
from outrider.text.token_bytes import TokenByteTable

SPECIALS = ["<s>", "</s>"]
TEXTS = st.text(max_size=40) | st.text(alphabet="a \u00e9\u20ac\U0001f680\u0301", max_size=20)


def byte_level() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u00f0", "\u0141"), ("h", "i"), ("\u0120", "hi")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    fast = FastTokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(SPECIALS)
    fast.add_tokens(["<tool>", "caf\u00e9 \U0001f680"])
    return fast


def sentence_piece() -> FastTokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "h", "i", "\u00e9", "hi", "\u2581hi"]
    merges = [("h", "i"), ("\u2581", "hi")]
    fast = FastTokenizer(
        models.BPE(
            {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
        )
    )
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    fast.add_special_tokens(SPECIALS)
    return fast


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


def stream(
    fast: FastTokenizer, ids: Sequence[int], cuts: Sequence[int], *, special: bool = False
) -> list[str]:
    """Text of each chunk of `ids`, cut at `cuts`, then of the end."""
    pieces = TokenByteTable.from_tokenizer(fast)
    detokenizer = Detokenizer(pieces.including_special() if special else pieces)
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pairs = itertools.pairwise(edges)
    return [*(detokenizer.push_tokens(ids[a:b]) for a, b in pairs), detokenizer.flush()]


CUTS = st.lists(st.integers(0, 200), max_size=8)


@pytest.mark.parametrize("fast", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte-level", "sentencepiece"])
@given(text=TEXTS, cuts=CUTS)
def test_any_text_in_any_chunks_equals_the_full_decode(
    fast: FastTokenizer, text: str, cuts: list[int]
) -> None:
    ids = fast.encode(text).ids
    chunks = stream(fast, ids, cuts)
    assert "".join(chunks) == fast.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert not any("\ufffd" in chunk for chunk in chunks)


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=30), cuts=CUTS)
def test_ids_that_form_no_valid_text_still_equal_the_full_decode(
    ids: list[int], cuts: list[int]
) -> None:
    full = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    assert "".join(stream(BYTE_LEVEL, ids, cuts)) == full


@pytest.mark.parametrize("fast", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte-level", "sentencepiece"])
@given(
    parts=st.lists(TEXTS | st.sampled_from(["</s>", "<s>", "</s></s>", " <s>"]), max_size=6),
    cuts=CUTS,
)
def test_special_tokens_have_their_text_where_they_are_not_skipped(
    fast: FastTokenizer, parts: list[str], cuts: list[int]
) -> None:
    ids = fast.encode("".join(parts)).ids
    full = fast.decode(ids, skip_special_tokens=False)
    assert "".join(stream(fast, ids, cuts, special=True)) == full


def test_a_character_split_across_tokens_appears_once_it_is_complete() -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in "\u00e2\u0124\u00ac"]
    assert stream(BYTE_LEVEL, ids, [1, 2]) == ["", "", "\u20ac", ""]


def test_an_incomplete_character_at_the_end_is_replaced_only_by_finish() -> None:
    ids = [BYTE_LEVEL.token_to_id(char) for char in "\u00e2\u0124"]
    assert stream(BYTE_LEVEL, ids, [1]) == ["", "", "\ufffd"]


def test_special_tokens_contribute_no_text_even_inside_a_character() -> None:
    first, second, third = (BYTE_LEVEL.token_to_id(char) for char in "\u00e2\u0124\u00ac")
    end = BYTE_LEVEL.token_to_id("</s>")
    assert "".join(stream(BYTE_LEVEL, [first, end, second, third], [1, 2])) == "\u20ac"


def test_the_prefix_space_is_stripped_once_at_the_start_only() -> None:
    hi = SENTENCE_PIECE.token_to_id("\u2581hi")
    assert stream(SENTENCE_PIECE, [hi, hi], [1]) == ["hi", " hi", ""]


def test_a_decoder_that_cannot_be_streamed_is_refused() -> None:
    fast = byte_level()
    fast.decoder = decoders.CTC()
    with pytest.raises(FailedPreconditionError, match="CTC"):
        TokenByteTable.from_tokenizer(fast)
