"""Token constraint of allowed ids and bad words, combined with a grammar if there is one.

Bad words are forbidden sequences of token ids. In shapes, W is the number of words of a mask
(`outrider.grammar.constraint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL_TOKENS, Constraint, Mask, mask_of, mask_words
from outrider.grammar.mask_jobs import MaskMeter
from outrider.spec.token_limits import TokenLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenTail = tuple[int, ...]
"""The last ids of an output, as many as can precede the last id of a bad word."""


def make_constraint(
    limits: TokenLimits | None, form: Constraint | None, *, vocab_size: int
) -> Constraint | None:
    """Create the constraint of a session with token limits, a grammar (`form`), or both.

    Returns None if the session has neither.
    """
    return form if limits is None else TokenConstraint(limits, vocab_size=vocab_size, form=form)


class TokenConstraint:
    """`Constraint` of one session that has allowed ids or bad words, and possibly a grammar. Use it
    from one thread at a time.

    At a position where the grammar allows only ids that are excluded, the allowed ids and bad words
    are ignored. At a position where bad words exclude all allowed ids, the bad words are ignored.
    """

    def __init__(
        self, limits: TokenLimits, *, vocab_size: int, form: Constraint | None = None
    ) -> None:
        """Create a constraint.

        `limits` holds the allowed ids and bad words; ids beyond the vocabulary are ignored. `form`
        is the grammar constraint of the session, at the start of its grammar; nothing else may use
        it.
        """
        self._form, self._vocab_size = form, vocab_size
        allowed = np.array(limits.allowed_ids, dtype=np.int64)
        if not len(allowed):
            allowed = np.arange(vocab_size)
        self._allowed = mask_of(allowed[allowed < vocab_size], mask_words(vocab_size))
        self._bad: dict[TokenTail, list[int]] = {}
        """Last ids of bad words, by the ids that precede them."""
        for word in limits.bad_words:
            if max(word) < vocab_size:
                self._bad.setdefault(word[:-1], []).append(word[-1])
        self._sizes = sorted({len(before) for before in self._bad})
        """Numbers of ids that precede the last id of a bad word."""
        self._reach = self._sizes[-1] if self._sizes else 0
        """Number of ids in a tail."""
        self._tail: TokenTail = ()
        self._entered: list[TokenTail] = []
        """Tails before each draft token entered."""

    @property
    def failure(self) -> str:
        """Failure of the grammar, or an empty text. Allowed ids and bad words cannot fail; see
        `Constraint`."""
        return "" if self._form is None else self._form.failure

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.advance_to(output_ids)
        if self._reach:
            self._tail = tuple(output_ids[-self._reach :].tolist())

    def commit_tokens(self) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.commit_tokens()
        self._entered.clear()

    @property
    def current_mask(self) -> Mask | None:
        """See `Constraint`."""
        here = None if self._form is None else self._form.current_mask
        if here is None:
            return None
        mask = here.copy()
        self._limit(mask, self._tail)
        return mask

    @property
    def num_mask_words(self) -> int:
        """See `Constraint`."""
        return len(self._allowed)

    @property
    def vocab_size(self) -> int:
        """See `Constraint`."""
        return self._vocab_size

    @property
    def matcher(self) -> LLMatcher | None:
        """See `Constraint`."""
        return None if self._form is None else self._form.matcher

    @property
    def meter(self) -> MaskMeter | None:
        """See `Constraint`."""
        return None if self._form is None else self._form.meter

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        """See `Constraint`."""
        return self._form is None or self._form.prepare(output_ids)

    def give_up(self, why: str) -> None:
        """Give up the grammar, if there is one; see `Constraint`."""
        if self._form is not None:
            self._form.give_up(why)

    def fill_masks(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        entered = len(tokens)
        if self._form is None:
            masks[:] = ALL_TOKENS
        else:
            entered = self._form.fill_masks(masks, tokens)
        tail = self._tail
        for depth, mask in enumerate(masks[: 1 + entered]):
            tail = self._behind(tail, *tokens[depth - 1 : depth]) if depth else tail
            self._limit(mask, tail)
        return entered

    def push_tokens(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        count = len(tokens) if self._form is None else self._form.push_tokens(tokens)
        for token in tokens[:count]:
            self._entered.append(self._tail)
            self._tail = self._behind(self._tail, token)
        return count

    def pop_tokens(self, count: int) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.pop_tokens(count)
        if count:
            self._tail = self._entered[-count]
            del self._entered[-count:]

    def forced_tokens(self) -> Sequence[int]:
        """Return no ids, because the limits may exclude ids that the grammar forces; see
        `Constraint`."""
        return ()

    def _behind(self, tail: TokenTail, *ids: int) -> TokenTail:
        """Return the tail after further ids."""
        return (*tail, *ids)[-self._reach :] if self._reach else tail

    def _completing(self, tail: TokenTail) -> list[int]:
        """Return the ids that would complete a bad word after a tail."""
        found: list[int] = []
        for size in self._sizes:
            if size > len(tail):
                break
            found += self._bad.get(tail[len(tail) - size :], ())
        return found

    def _limit(self, mask: Mask, tail: TokenTail) -> None:
        """Remove the ids that the limits do not allow after a tail from a mask, in place."""
        allowed = mask & self._allowed
        if not allowed.any():
            return
        mask[:] = allowed
        for token in self._completing(tail):
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not mask.any():
            mask[:] = allowed
