from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.noise import extend_digests as torch_extend_digests
from outrider.engine.noise import mix64_
from outrider.spec.digest import EMPTY_DIGEST, extend_digest, extend_digests, extend_ragged
from outrider.spec.mix64 import GOLDEN64, MASK64, mix64, mix64_array

WORDS = st.integers(0, MASK64)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, GOLDEN64]


def test_mix64_is_the_published_splitmix64() -> None:
    """The widely published first outputs of SplitMix64 for the seed 1234567."""
    outputs = [mix64(1234567 + k * GOLDEN64) for k in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.lists(WORDS, min_size=1))
def test_python_numpy_and_torch_mix_alike(words: list[int]) -> None:
    words = words + EXTREMES
    expected = [mix64(word) for word in words]
    array = np.array(words, dtype=np.uint64)
    assert mix64_array(array).tolist() == expected
    tensor = mix64_(torch.from_numpy(array.view(np.int64).copy()))
    assert tensor.numpy().view(np.uint64).tolist() == expected


@given(WORDS, TOKENS)
def test_a_digest_is_the_same_in_python_numpy_and_torch(digest: int, tokens: list[int]) -> None:
    expected = extend_digest(digest, tokens)
    by_numpy = np.array([digest], dtype=np.uint64)
    by_torch = torch.from_numpy(by_numpy.view(np.int64).copy())
    for token in tokens:
        by_numpy = extend_digests(by_numpy, np.array([token]))
        by_torch = torch_extend_digests(by_torch, torch.tensor([token]))
    assert by_numpy.tolist() == [expected]
    assert by_torch.numpy().view(np.uint64).tolist() == [expected]


@given(TOKENS, TOKENS)
def test_a_digest_can_be_extended_in_pieces(head: list[int], tail: list[int]) -> None:
    whole = extend_digest(EMPTY_DIGEST, head + tail)
    assert extend_digest(extend_digest(EMPTY_DIGEST, head), tail) == whole
    assert 0 <= whole <= MASK64


def test_order_length_and_every_token_matter() -> None:
    prefixes = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (1, 2, 0)]
    assert len({extend_digest(EMPTY_DIGEST, p) for p in prefixes}) == len(prefixes)


def test_the_chain_is_pinned() -> None:
    """Both sides of a wire compute this; a change needs a new protocol version."""
    assert extend_digest(EMPTY_DIGEST, [1, 2, 3]) == 0xC71093E826F7C624


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64 - 1),
            st.lists(st.integers(0, 2**24), max_size=5) | st.just(list(range(100))),
        ),
        max_size=24,
    )
)
def test_prefixes_of_many_sessions_are_extended_at_once(
    sessions: list[tuple[int, list[int]]],
) -> None:
    digests = np.array([digest for digest, _ in sessions], dtype=np.uint64)
    counts = np.array([len(tokens) for _, tokens in sessions], dtype=np.int64)
    tokens = np.array([t for _, part in sessions for t in part], dtype=np.int32)
    expected = [extend_digest(digest, part) for digest, part in sessions]
    assert extend_ragged(digests, counts, tokens).tolist() == expected


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_an_array_has_the_digest_of_its_ids(tokens: list[int]) -> None:
    assert extend_digest(5, np.array(tokens, dtype=np.int32)) == extend_digest(5, tokens)
