"""Token constraint of allowed ids, bad words and thinking, combined with a grammar if there is one.

Bad words are forbidden sequences of token ids. In shapes, W is the number of words of a mask
(`outrider.grammar.constraint`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import (
    ALL_TOKENS,
    Constraint,
    Mask,
    is_allowed,
    mask_of,
    mask_words,
)
from outrider.grammar.mask_jobs import MaskMeter
from outrider.grammar.thinking_limit import ANSWER, ThinkingLimit, ThinkingPosition
from outrider.spec.token_limits import TokenLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenTail = tuple[int, ...]
"""The last ids of an output, as many as can precede the last id of a bad word."""


class _Position(NamedTuple):
    """Position in an output."""

    tail: TokenTail
    thinking: ThinkingPosition
    """Position in the reasoning; `ANSWER` in a session without a thinking limit."""


def make_constraint(
    limits: TokenLimits | None,
    form: Constraint | None,
    *,
    vocab_size: int,
    thinking: ThinkingLimit | None = None,
) -> Constraint | None:
    """Create the constraint of a session with token limits, a grammar (`form`), a thinking limit or
    several of them.

    Returns None if the session has none of them.
    """
    if limits is None and thinking is None:
        return form
    return TokenConstraint(limits, vocab_size=vocab_size, form=form, thinking=thinking)


class TokenConstraint:
    """`Constraint` of one session that has allowed ids, bad words or a thinking limit, and possibly
    a grammar. Use it from one thread at a time.

    Where the thinking limit forces an id, only this id is allowed. A grammar may not allow it in
    the middle of a character; it is then forced behind the character.

    At a position where the grammar allows only ids that are excluded, the allowed ids and bad words
    are ignored. At a position where bad words exclude all allowed ids, the bad words are ignored.
    """

    def __init__(
        self,
        limits: TokenLimits | None,
        *,
        vocab_size: int,
        form: Constraint | None = None,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        """Create a constraint.

        `limits` holds the allowed ids and bad words, or is None if there are none; ids beyond the
        vocabulary are ignored. `form` is the grammar constraint of the session, at the start of its
        grammar; nothing else may use it. `thinking` limits the reasoning; None for no limit.
        """
        self._form, self._vocab_size, self._thinking = form, vocab_size, thinking
        self._has_limits = limits is not None
        allowed = np.array(() if limits is None else limits.allowed_ids, dtype=np.int64)
        if not len(allowed):
            allowed = np.arange(vocab_size)
        self._allowed = mask_of(allowed[allowed < vocab_size], mask_words(vocab_size))
        self._bad: dict[TokenTail, list[int]] = {}
        """Last ids of bad words, by the ids that precede them."""
        for word in () if limits is None else limits.bad_words:
            if max(word) < vocab_size:
                self._bad.setdefault(word[:-1], []).append(word[-1])
        self._sizes = sorted({len(before) for before in self._bad})
        """Numbers of ids that precede the last id of a bad word."""
        self._reach = self._sizes[-1] if self._sizes else 0
        """Number of ids in a tail."""
        self._position = _Position((), ANSWER if thinking is None else thinking.start)
        self._num_seen = 0
        """Number of emitted tokens before the position."""
        self._entered: list[_Position] = []
        """Positions before each draft token entered."""

    @property
    def failure(self) -> str:
        """Failure of the grammar, or an empty text. Allowed ids and bad words cannot fail; see
        `Constraint`."""
        return "" if self._form is None else self._form.failure

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.advance_to(output_ids)
        tail, thinking = self._position
        if self._reach:
            tail = tuple(output_ids[-self._reach :].tolist())
        if self._thinking is not None and thinking is not ANSWER:
            new = output_ids[self._num_seen :].tolist()
            thinking = self._thinking.advance(thinking, new)
        self._position, self._num_seen = _Position(tail, thinking), len(output_ids)

    def commit_tokens(self) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.commit_tokens()
        self._num_seen += len(self._entered)
        self._entered.clear()

    @property
    def current_mask(self) -> Mask | None:
        """See `Constraint`."""
        here = None if self._form is None else self._form.current_mask
        if here is None:
            return None
        mask = here.copy()
        self._limit(mask, self._position)
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
        position = self._position
        for depth, mask in enumerate(masks[: 1 + entered]):
            position = self._behind(position, tokens[depth - 1]) if depth else position
            self._limit(mask, position)
        return entered

    def push_tokens(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        count = len(tokens) if self._form is None else self._form.push_tokens(tokens)
        for token in tokens[:count]:
            self._entered.append(self._position)
            self._position = self._behind(self._position, token)
        return count

    def pop_tokens(self, count: int) -> None:
        """See `Constraint`."""
        if self._form is not None:
            self._form.pop_tokens(count)
        if count:
            self._position = self._entered[-count]
            del self._entered[-count:]

    def forced_tokens(self) -> Sequence[int]:
        """Return no ids while limits may exclude ids that the grammar forces; see `Constraint`."""
        if self._form is None or self._has_limits or self._position.thinking is not ANSWER:
            return ()
        return self._form.forced_tokens()

    def _behind(self, position: _Position, token: int) -> _Position:
        """Return the position after a further token."""
        tail, thinking = position
        if self._reach:
            tail = (*tail, token)[-self._reach :]
        if self._thinking is not None:
            thinking = self._thinking.advance(thinking, (token,))
        return _Position(tail, thinking)

    def _completing(self, tail: TokenTail) -> list[int]:
        """Return the ids that would complete a bad word after a tail."""
        found: list[int] = []
        for size in self._sizes:
            if size > len(tail):
                break
            found += self._bad.get(tail[len(tail) - size :], ())
        return found

    def _limit(self, mask: Mask, position: _Position) -> None:
        """Remove the ids that the limits do not allow at a position from a mask, in place."""
        if self._thinking is not None:
            forced = self._thinking.forced_id(position.thinking)
            if forced is not None and is_allowed(mask, forced):
                mask[:] = 0
                mask[forced >> 5] = np.uint32(1 << (forced & 31))
                return
        if not self._has_limits:
            return
        allowed = mask & self._allowed
        if not allowed.any():
            return
        mask[:] = allowed
        for token in self._completing(position.tail):
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if not mask.any():
            mask[:] = allowed
