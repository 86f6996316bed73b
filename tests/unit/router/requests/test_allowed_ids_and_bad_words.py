"""Allowed ids and bad words of a request, as the router sends them to verifiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.requests.request import make_token_limits
from outrider_router.requests.service import RouterService

from outrider.errors import InvalidRequestError
from outrider.spec.token_limits import TokenLimits
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import SamplingOptions
from tests.fakes.tokenizer import make_tokenizer_dir
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import assert_all_freed, text_request

VOCAB = 259


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_dir(tmp_path))


def made(tokenizer: Tokenizer, **options: object) -> tuple[tuple[int, ...], TokenLimits | None]:
    return make_token_limits(SamplingOptions(**options), tokenizer, VOCAB)  # type: ignore[arg-type]


def test_words_are_banned_alone_and_behind_a_space(tokenizer: Tokenizer) -> None:
    space, a, b = tokenizer.encode(" ab")
    for word in ("ab", " ab", "  ab"):
        banned, limits = made(tokenizer, bad_words=(word,), banned_token_ids=(9,))
        assert banned == (9,)
        assert limits == TokenLimits(bad_words=((a, b), (space, a, b)))


def test_words_of_one_token_are_banned_ids(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    (space,) = tokenizer.encode(" ")
    assert made(tokenizer, bad_words=("a", "ba", "b"), banned_token_ids=(b, 9)) == ((b, 9, a), None)
    assert made(tokenizer, bad_words=(" ",)) == ((space,), None)
    assert made(tokenizer) == ((), None)


def test_allowed_ids_are_told_once_each(tokenizer: Tokenizer) -> None:
    assert made(tokenizer, allowed_token_ids=(7, 3, 7)) == ((), TokenLimits(allowed_ids=(7, 3)))


def test_what_cannot_be_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids contains 259"):
        made(tokenizer, allowed_token_ids=(VOCAB,))
    with pytest.raises(InvalidRequestError, match="each of bad_words must be 1 to 64 ids"):
        made(tokenizer, bad_words=("a" * 257,))
    with pytest.raises(InvalidRequestError, match="which has no tokens"):
        made(tokenizer, bad_words=("",))


async def test_a_verifier_is_told_of_them(router: RouterService, verifier: FakeVerifier) -> None:
    sampling = SamplingOptions(allowed_token_ids=(5, 6), bad_words=("xy", "z"))
    await router.generate(replace(text_request(), sampling=sampling))
    (spec,) = verifier.specs[-1:]
    assert spec.token_limits is not None and spec.token_limits.allowed_ids == (5, 6)
    assert len(spec.token_limits.bad_words) == 2
    assert spec.sampling.banned_ids == router.tokenizer.encode("z")
    with pytest.raises(InvalidRequestError, match="ids must be in"):
        await router.generate(
            replace(text_request(), sampling=SamplingOptions(allowed_token_ids=(10**6,)))
        )
    await assert_all_freed(router, verifier)
