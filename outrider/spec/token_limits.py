"""Token limits of a request: allowed ids and bad words (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidRequestError

MAX_ALLOWED_IDS = 1 << 16
MAX_BAD_WORDS = 256
"""Maximum number of bad words (forbidden sequences of ids)."""
MAX_BAD_WORD_TOKENS = 64
"""Maximum number of ids of one bad word."""


def _require(ok: bool, message: str, param: str = "") -> None:
    if not ok:
        raise InvalidRequestError(message, reason="INVALID_SAMPLING", param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Allowed ids and bad words of a request. Bad words are forbidden sequences of ids.

    Raises InvalidRequestError if both are empty or one exceeds its maximum size. The ids that are
    excluded at a position depend only on the tokens emitted before it.
    """

    allowed_ids: tuple[int, ...] = ()
    """The only ids that may be emitted; empty if all ids may be."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of at least one id that are never emitted as consecutive tokens."""

    def __post_init__(self) -> None:
        _require(
            bool(self.allowed_ids or self.bad_words),
            "token limits must have allowed ids or bad words",
        )
        _require(
            len(self.allowed_ids) <= MAX_ALLOWED_IDS and min(self.allowed_ids, default=0) >= 0,
            f"allowed_ids must be at most {MAX_ALLOWED_IDS} ids >= 0",
        )
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS,
            f"bad_words must be at most {MAX_BAD_WORDS} sequences, got {len(self.bad_words)}",
            param="bad_words",
        )
        _require(
            all(0 < len(word) <= MAX_BAD_WORD_TOKENS and min(word) >= 0 for word in self.bad_words),
            f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} ids >= 0",
            param="bad_words",
        )
