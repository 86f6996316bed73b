"""Grammar constraint: a session's position in its grammar, and the masks there and along drafts.

Masks are those of `outrider.grammar.constraint`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import Mask, is_allowed, mask_of, mask_words
from outrider.grammar.digit_bound import DigitBound, JsonPosition
from outrider.grammar.error_messages import plain_error_message
from outrider.grammar.limits import MaskLimits
from outrider.grammar.mask_jobs import (
    MaskJob,
    MaskMeter,
    background_workers,
    consume_without_lock,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarConstraint:
    """`Constraint` of one session that has a compiled grammar.

    The session's stop ids are allowed where the output is complete. Elsewhere they are allowed only
    if the grammar allows their text.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        vocab_size: int,
        end_id: int,
        stop_ids: Sequence[int],
        meter: MaskMeter | None = None,
        digits: tuple[DigitBound, JsonPosition] | None = None,
    ) -> None:
        """Create a constraint.

        `matcher` must be at the start of the grammar, and nothing else may use it. The matcher
        allows `end_id` where the output is complete; the session ends with one of `stop_ids`
        instead. `meter` limits the time that masks may take. `digits` limits the digits of numbers,
        from a position on, if the output has those of JSON.
        """
        self._matcher = matcher
        self._vocab_size, self._end_id = vocab_size, end_id
        self._words = mask_words(vocab_size)
        self._stops = mask_of(stop_ids, self._words)
        self._seen = self._entered = 0
        self._meter = meter or MaskMeter(MaskLimits(), may_be_ambiguous=False)
        self._digits = None if digits is None else digits[0]
        self._positions = [JsonPosition() if digits is None else digits[1]]
        """JSON positions that `digits` needs: after the accepted tokens, and after each entered
        draft token."""
        self._job: MaskJob | None = None
        """Background computation of the next masks; nothing else may use the matcher meanwhile."""
        self.is_given_up = False
        """Whether the constraint failed because computing masks or consuming tokens took too
        long."""
        self._here: tuple[int, Mask] | None = None
        """Number of accepted and entered tokens at the current position, and the mask there."""
        self.failure = ""
        """Reason why the session cannot continue; empty while it can."""

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        """See `Constraint`. Sets `failure` if the grammar does not allow a token."""
        self._finish_job()
        new = output_ids[self._seen :].tolist()
        self._seen = len(output_ids)
        if not new or self.failure:
            return
        self._here = None
        taken = self._matcher.try_consume_tokens(new)
        if taken < len(new):
            self._fail_at(f"token {new[taken]}")
            return
        self._advance(new)

    def resume(self, output_ids: NDArray[np.int32]) -> None:
        """Advance over all tokens that the session emitted before this constraint was created.

        This takes up to seconds for a long output; other threads can run meanwhile. Sets `failure`
        if the grammar does not allow a token, or if advancing takes too long.
        """
        self._seen = len(output_ids)
        for token in output_ids.tolist():
            began = time.monotonic()
            if not consume_without_lock(self._matcher, [token]):
                self._fail_at(f"token {token}")
            elif why := self._meter.record_consumption(time.monotonic() - began):
                self.give_up(why)
            if self.failure:
                return
        self._advance(output_ids.tolist())

    def _advance(self, tokens: Sequence[int]) -> None:
        """Record the position after accepted tokens."""
        if self._digits is not None:
            position = self._positions[-1]
            for token in tokens:
                position = self._digits.advance(position, token)
            self._positions = [position]

    def commit_tokens(self) -> None:
        """See `Constraint`."""
        self._seen += self._entered
        self._entered = 0
        del self._positions[:-1]

    @property
    def current_mask(self) -> Mask | None:
        """See `Constraint`."""
        if self._here is None or self._here[0] != self._seen + self._entered:
            return None
        return self._here[1]

    @property
    def num_mask_words(self) -> int:
        """See `Constraint`."""
        return self._words

    @property
    def matcher(self) -> LLMatcher | None:
        """See `Constraint`."""
        self._finish_job()
        return None if self.failure else self._matcher

    @property
    def meter(self) -> MaskMeter:
        """See `Constraint`."""
        return self._meter

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        """See `Constraint`."""
        if self._job is not None:
            background_workers().check_late(self._job)
            if not (self._job.done.is_set() or self._job.is_late):
                return False
            self._finish_job()
        if self.failure or (self._seen == len(output_ids) and self.current_mask is not None):
            return True
        new = output_ids[self._seen :].tolist()
        self._seen, self._here = len(output_ids), None
        self._advance(new)
        self._job = MaskJob(self._matcher, self._meter, self._words, output=new)
        background_workers().start(self._job)
        return False

    def _finish_job(self) -> None:
        """Wait for the background computation and take its results."""
        job, self._job = self._job, None
        if job is None:
            return
        background_workers().wait(job)
        if why := self._meter.record(job):
            self.give_up(why)
        elif job.consumed < job.num_output:
            self._fail_at("a token")
        else:
            self.fill_masks(job.masks, ())

    def give_up(self, why: str) -> None:
        """See `Constraint`."""
        self.is_given_up = True
        self._fail(why)

    @property
    def vocab_size(self) -> int:
        """See `Constraint`."""
        return self._vocab_size

    def fill_masks(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        """See `Constraint`."""
        if not self.failure and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        position = self._positions[-1]
        for depth, mask in enumerate(masks):
            goes_on = not self.failure and depth < len(tokens)
            # Its own end id, which the library does not count as text, is none of the session's.
            goes_on = goes_on and tokens[depth] != self._end_id and is_allowed(mask, tokens[depth])
            known = self._finish(mask, drafted=depth + self._entered > 0)
            if known and self._digits is not None:
                self._digits.restrict(mask, position)
                goes_on = goes_on and is_allowed(mask, tokens[depth])
                position = self._digits.advance(position, tokens[depth]) if goes_on else position
            if not depth:
                at = self._seen + self._entered
                self._here = (at, mask) if known else None
            if not goes_on:
                return depth
        return len(tokens)

    def _finish(self, mask: Mask, *, drafted: bool) -> bool:
        """Apply the session's end to a mask from the matcher, in place: stop ids are allowed
        exactly where the output is complete.

        Returns False if only the end of the session is left. A mask that allows nothing sets
        `failure` unless it is a mask after draft tokens (`drafted`).
        """
        if self.failure:
            # The session is about to end by an error; whatever is emitted until then ends it too.
            mask[:] = self._stops
            return False
        complete = is_allowed(mask, self._end_id)
        mask[self._end_id >> 5] &= ~np.uint32(1 << (self._end_id & 31))
        if complete:
            mask |= self._stops
        elif not mask.any():
            # Behind a draft it is no failure: there is nothing that could be drafted.
            if not drafted:
                self._fail("the tokenizer has no id with which the output could go on")
            mask[:] = self._stops
            return False
        return True

    def push_tokens(self, tokens: Sequence[int]) -> int:
        """See `Constraint`. Also stops before a token that the grammar does not allow here."""
        self._finish_job()
        if self.failure or not tokens:
            return 0
        inside = tokens
        for count, token in enumerate(tokens):
            if token == self._end_id or not 0 <= token < self._vocab_size:
                inside = tokens[:count]
                break
        count = int(self._matcher.try_consume_tokens(list(inside))) if inside else 0
        self._entered += count
        if self._digits is not None:
            for token in inside[:count]:
                self._positions.append(self._digits.advance(self._positions[-1], token))
        return count

    def pop_tokens(self, count: int) -> None:
        """See `Constraint`."""
        if count:
            if not self.is_given_up:
                self._matcher.rollback(count)
            self._entered -= count
            if self._digits is not None:
                del self._positions[-count:]
            self._here = None

    def forced_tokens(self) -> Sequence[int]:
        """See `Constraint`."""
        self._finish_job()
        return () if self.failure else self._matcher.compute_ff_tokens()

    def _fail_at(self, token: str) -> None:
        """Set `failure` because the matcher refused a token, with the matcher's own error if it has
        one."""
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        self._fail(error or f"{token} does not fit the grammar")

    def _fail(self, why: str) -> None:
        self.failure = plain_error_message(why).splitlines()[0] if why else "unknown"
