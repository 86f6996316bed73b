"""Token constraints of sessions: allowed-token masks at a position and along drafts.

A mask is a bit set over token ids of the target: uint32 [W] with W = ceil(V / 32) words for V ids.
Id i is bit i % 32 of word i // 32. In shapes, P is the number of paths and k the number of draft
tokens.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.mask_jobs import MaskJob, MaskMeter, round_workers, worker_threads

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

Mask = NDArray[np.uint32]
ALL_TOKENS = np.uint32(0xFFFFFFFF)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask for `vocab_size` ids."""
    return -(-vocab_size // 32)


def mask_of(ids: Sequence[int] | NDArray[np.int64], words: int) -> Mask:
    """Return the mask that allows exactly `ids`, uint32 [words].

    Every id must be below 32 * `words`.
    """
    found = np.zeros(32 * words, dtype=np.bool_)
    found[np.asarray(ids, dtype=np.int64)] = True
    return np.packbits(found, bitorder="little").view("<u4").astype(np.uint32)


def is_allowed(mask: Mask, token: int) -> bool:
    """Return whether a mask allows a token id. The id must be below 32 times the number of
    words."""
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def single_id(mask: Mask) -> int | None:
    """Return the only id that a mask allows, or None if it allows no id or several."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.argmax())
    bits = int(mask[word])
    return None if bits & (bits - 1) else 32 * word + bits.bit_length() - 1


def small_id_set(mask: Mask, most: int) -> list[int]:
    """Return the ids that a mask allows, ascending, or an empty list if there are more than
    `most`."""
    words = np.flatnonzero(mask)
    if len(words) > most:
        return []
    ids = [
        32 * int(word) + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1
    ]
    return ids if len(ids) <= most else []


class Constraint(Protocol):
    """Token constraint of one session: it determines which tokens may follow at the current
    position.

    The position is in the session's output. It moves forward over accepted tokens and never back
    over them. `push_tokens` moves it forward along draft tokens, and `pop_tokens` moves it back.
    Use a constraint from one thread at a time.
    """

    @property
    def failure(self) -> str:
        """Reason why the session cannot continue; empty while it can."""
        ...

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        """Advance to the position after `output_ids`, which are all tokens that the session has
        emitted so far. Only tokens that earlier calls have not processed are processed."""
        ...

    def commit_tokens(self) -> None:
        """Accept the draft tokens that `push_tokens` moved over, because the session has emitted
        them."""
        ...

    @property
    def current_mask(self) -> Mask | None:
        """Mask at the current position if it was computed before, else None.

        Callers must not change it.
        """
        ...

    @property
    def num_mask_words(self) -> int:
        """Number of 32-bit words of a mask (W)."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids (V)."""
        ...

    @property
    def matcher(self) -> LLMatcher | None:
        """llguidance matcher that computes the grammar's masks at the current position and along
        drafts.

        None if the constraint has no grammar or has a `failure`.
        """
        ...

    @property
    def meter(self) -> MaskMeter | None:
        """Meter of the time that computing the session's masks takes; None if the constraint has no
        grammar."""
        ...

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        """Return whether the mask after `output_ids`, all tokens emitted so far, is available.

        If the mask is not available, its computation starts in the background. Returns True if the
        constraint has a `failure`.
        """
        ...

    def give_up(self, why: str) -> None:
        """Set `failure` to the reason `why`, so that the session ends. The matcher is not used any
        more."""
        ...

    def fill_masks(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        """Turn the matcher's masks into the masks of this constraint, in place.

        `masks`, uint32 [1 + k, W], holds the matcher's mask at the current position and after each
        of the k draft tokens. Returns the number n of leading draft tokens after which the
        constraint can continue. Only rows 0 to n are meaningful afterwards.
        """
        ...

    def push_tokens(self, tokens: Sequence[int]) -> int:
        """Move the position forward along draft tokens, up to the first one after which the
        constraint cannot continue.

        Returns the number of tokens that the position has moved over.
        """
        ...

    def pop_tokens(self, count: int) -> None:
        """Move the position back over the last `count` draft tokens.

        All draft tokens must be undone in this way before `advance_to` is called.
        """
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Return the ids that must follow at the current position because no others are allowed.
        The list ends where the constraint does not know the next id."""
        ...


class PathMasks(NamedTuple):
    """Allowed-token masks at a constraint's current position and along draft tokens."""

    masks: NDArray[np.uint32]
    """Masks at the current position and after each draft token, uint32 [1 + k, W]. Rows after a
    token that is not allowed, or after which nothing can follow, are not meaningful."""
    entered: int
    """Number of leading draft tokens after which the constraint can continue."""


MaskRequest = tuple[Constraint, Sequence[int]]
"""A constraint and the draft tokens along which its masks are requested."""


def masks_along_drafts(wishes: Sequence[MaskRequest]) -> list[PathMasks]:
    """Return the masks of each constraint at its current position and along its draft tokens.

    `wishes` must not contain a constraint twice. As many masks as possible are computed in one call
    of the library: every call releases the interpreter lock, and getting it back can take ten times
    as long as a mask.
    """
    if not wishes:
        return []
    known = [_valid_ids(tokens, constraint.vocab_size) for constraint, tokens in wishes]
    first = [0, *itertools.accumulate(1 + len(tokens) for _, tokens in wishes)]
    masks = np.full((first[-1], wishes[0][0].num_mask_words), ALL_TOKENS, dtype=np.uint32)
    told = [None if tokens else constraint.current_mask for constraint, tokens in wishes]
    asked = [
        (constraint, row, tokens)
        for (constraint, _), here, row, tokens in zip(wishes, told, first, known, strict=False)
        if here is None
    ]
    _ask_together(asked, masks)
    found: list[PathMasks] = []
    spans = itertools.pairwise(first)
    for (constraint, _), here, span, tokens in zip(wishes, told, spans, known, strict=True):
        mine = masks[slice(*span)]
        if here is not None:
            mine[:] = here
            found.append(PathMasks(mine, 0))
            continue
        entered = constraint.fill_masks(mine, tokens)
        mine[1 + entered :] = ALL_TOKENS
        found.append(PathMasks(mine, entered))
    return found


def _valid_ids(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Return the tokens before the first one that is outside the vocabulary."""
    return list(itertools.takewhile(lambda token: 0 <= token < vocab_size, tokens))


def is_slow(constraint: Constraint | None) -> bool:
    """Return whether a session's masks are so slow that rounds run without the session while its
    masks are computed."""
    if constraint is None or (meter := constraint.meter) is None:
        return False
    return meter.is_slow and not constraint.failure


_Asked = tuple[Constraint, int, list[int]]
"""A constraint, the row of its first mask, and the draft tokens along which masks are requested."""


def _ask_together(asked: Sequence[_Asked], masks: NDArray[np.uint32]) -> None:
    """Compute the masks of constraints into `masks`, in one call except for expensive matchers."""
    joint: list[tuple[LLMatcher, int, list[int]]] = []
    meters: list[MaskMeter] = []
    jobs: list[tuple[MaskJob, _Asked]] = []
    for each in asked:
        constraint, row, tokens = each
        matcher, meter = constraint.matcher, constraint.meter
        if matcher is None:
            continue
        if meter is not None and meter.is_alone:
            jobs.append((MaskJob(matcher, meter, constraint.num_mask_words, drafts=tokens), each))
            continue
        joint.append((matcher, row, tokens))
        meters += [] if meter is None else [meter]
    for job, _ in jobs:
        round_workers().start(job)
    if joint:
        began = time.perf_counter()
        _ask(joint, masks)
        for meter in meters:
            meter.record_joint(time.perf_counter() - began)
    for job, (constraint, row, _) in jobs:
        round_workers().wait(job)
        meter = constraint.meter
        assert meter is not None
        if why := meter.record(job):
            constraint.give_up(why)
        else:
            masks[row : row + len(job.masks)] = job.masks


def _ask(asked: Sequence[tuple[LLMatcher, int, list[int]]], masks: NDArray[np.uint32]) -> None:
    """Compute the masks of matchers into `masks`, each from its given row on."""
    plain = [(matcher, row) for matcher, row, tokens in asked if not tokens]
    where = (masks.ctypes.data, masks[0].nbytes, len(masks))
    if len(plain) == 1:
        matcher, row = plain[0]
        matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, masks[row].nbytes)
    elif plain:
        _executor().unsafe_compute_mask_ptr(plain, *where)
    # The library wants a draft token at least.
    drafted = [each for each in asked if each[2]]
    if drafted:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, *where)


def allowed_mask(constraint: Constraint) -> Mask:
    """Return the mask of a constraint at its current position."""
    mask: Mask = masks_along_drafts([(constraint, ())])[0].masks[0]
    return mask


def masks_of_paths(constraint: Constraint, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """Return the mask after each path of draft tokens, uint32 [P, W]. Each path begins at the
    constraint's current position.

    The row of a path after which nothing can follow is not meaningful.
    """
    masks = np.full((len(paths), constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
    for mask, path in zip(masks, paths, strict=True):
        entered = constraint.push_tokens(path)
        if entered == len(path):
            mask[:] = allowed_mask(constraint)
        constraint.pop_tokens(entered)
    return masks


def allowed_prefix_len(constraint: Constraint, tokens: Sequence[int]) -> int:
    """Return the length of the longest prefix of `tokens` that the constraint allows at its current
    position."""
    along = masks_along_drafts([(constraint, tokens)])[0]
    for count, token in enumerate(tokens):
        inside = count <= along.entered and 0 <= token < constraint.vocab_size
        if not inside or not is_allowed(along.masks[count], token):
            return count
    return len(tokens)


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(worker_threads())
