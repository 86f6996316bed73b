"""Where a session is in its grammar, and which ids may follow there and at every node of a draft.

N nodes of a tree; masks as in `outrider.grammar.constraint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL, Mask, allows, legal_of, mask_of, mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher


class FormConstraint:
    """One session's way through its grammar.

    The ids that end the session are legal where the output is complete, and nowhere else unless
    the grammar has them as text. What stands is never taken back; drafts are tried and undone.
    """

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, end_id: int, stop_ids: Sequence[int]
    ) -> None:
        """`matcher`: at the beginning, of this object alone; `end_id`: the id by which the matcher
        says that the output is complete."""
        self._matcher = matcher
        self._vocab_size, self._end_id = vocab_size, end_id
        self._words = mask_words(vocab_size)
        self._stops = mask_of(stop_ids, self._words)
        self._seen = 0
        self.failed = ""
        """Why the session cannot go on; empty while it can."""

    def follow(self, output_ids: NDArray[np.int32]) -> None:
        """See `Constraint`. What the grammar does not allow makes it `failed`."""
        new = output_ids[self._seen :].tolist()
        self._seen = len(output_ids)
        if not new or self.failed:
            return
        taken = self._matcher.try_consume_tokens(new)
        if taken < len(new):
            self._fail(f"token {new[taken]} does not fit the grammar")

    @property
    def words(self) -> int:
        """See `Constraint`."""
        return self._words

    @property
    def matcher(self) -> LLMatcher | None:
        """See `Constraint`."""
        return None if self.failed else self._matcher

    def legal(self) -> Mask:
        """What may follow where it is, uint32 [W]."""
        mask: Mask = legal_of((self,))[0]
        return mask

    def enter(self, token: int) -> bool:
        """See `Constraint`; False, too, for a token that the grammar does not have here."""
        if self.failed or token == self._end_id or not 0 <= token < self._vocab_size:
            return False
        return int(self._matcher.try_consume_tokens([token])) == 1

    def leave(self, count: int) -> None:
        """See `Constraint`."""
        if count:
            self._matcher.rollback(count)

    def path_masks(self, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
        """See `Constraint`."""
        masks = np.full((len(paths), self._words), ALL, dtype=np.uint32)
        for mask, path in zip(masks, paths, strict=True):
            entered = 0
            while entered < len(path) and self.enter(path[entered]):
                entered += 1
            if entered == len(path):
                mask[:] = self.legal()
            if entered:
                self._matcher.rollback(entered)
        return masks

    def legal_prefix(self, tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        if self.failed:
            return 0
        entered = 0
        while entered < len(tokens) and self.enter(tokens[entered]):
            entered += 1
        # An end has nothing behind it, but may be drafted itself.
        ends = entered < len(tokens) and self._ends(tokens[entered])
        if entered:
            self._matcher.rollback(entered)
        return entered + int(ends)

    def _ends(self, token: int) -> bool:
        inside = 0 <= token < self._vocab_size
        return inside and allows(self._stops, token) and bool(self._matcher.is_accepting())

    def finish(self, mask: Mask) -> None:
        """See `Constraint`."""
        if not self.failed and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        if self.failed:
            # The session is about to end by an error; whatever is emitted until then ends it too.
            mask[:] = self._stops
            return
        mask[self._end_id >> 5] &= ~np.uint32(1 << (self._end_id & 31))
        if self._matcher.is_accepting():
            mask |= self._stops
        elif not mask.any():
            self._fail("the tokenizer has no id with which the output could go on")
            mask[:] = self._stops

    def _fail(self, why: str) -> None:
        self.failed = why.splitlines()[0] if why else "unknown"
