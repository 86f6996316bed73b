"""From allowed ids and bad words to what a verifier is told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from outrider.errors import InvalidRequestError
from outrider.spec.token_limits import TokenLimits
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import SamplingOptions
from outrider_router.requests.request_options import check_ids

_Ids = tuple[int, ...]


def make_token_limits(
    options: SamplingOptions, tokenizer: Tokenizer, vocab_size: int
) -> tuple[_Ids, TokenLimits | None]:
    """Ids that are never emitted, and the limits that say more than that, if there are any.

    A bad word of one token is a banned id, which costs nothing. Raises InvalidRequestError.
    """
    allowed = tuple(dict.fromkeys(options.allowed_token_ids))
    check_ids(allowed, vocab_size, "allowed_token_ids")
    words = _written(options.bad_words, tokenizer)
    for ids in words:
        check_ids(ids, vocab_size, "bad_words")
    alone = {ids[0]: None for ids in words if len(ids) == 1}
    # One that ends with such an id is never completed.
    longer = tuple(ids for ids in words if ids[-1] not in alone)
    banned = tuple(dict.fromkeys((*options.banned_token_ids, *alone)))
    if not allowed and not longer:
        return banned, None
    return banned, TokenLimits(allowed_ids=allowed, bad_words=longer)


@lru_cache(maxsize=16)
def _written(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[_Ids, ...]:
    """The ids of words, each of them once. All answers of a call have the same words."""
    return tuple(dict.fromkeys(ids for word in words for ids in _token_id_forms(word, tokenizer)))


def _token_id_forms(word: str, tokenizer: Tokenizer) -> Iterator[_Ids]:
    """The ids of a word as it stands alone, and as it follows a space."""
    bare = word.lstrip(" ")
    for text in (bare, f" {bare}") if bare else (word,):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, which has no tokens",
                reason="INVALID_SAMPLING",
                param="bad_words",
            )
        yield ids
