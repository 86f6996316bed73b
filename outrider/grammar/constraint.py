"""Token constraints of sessions: allowed-token masks at a position and along drafts.

A mask is a bit set over target ids: uint32 [W], W = ceil(V / 32), id i is bit i % 32 of word
i // 32. P paths; k draft tokens, V ids.
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
    """W: words of a mask."""
    return -(-vocab_size // 32)


def mask_of(ids: Sequence[int] | NDArray[np.int64], words: int) -> Mask:
    """The mask of these ids, uint32 [words]; it must have a bit for each."""
    found = np.zeros(32 * words, dtype=np.bool_)
    found[np.asarray(ids, dtype=np.int64)] = True
    return np.packbits(found, bitorder="little").view("<u4").astype(np.uint32)


def is_allowed(mask: Mask, token: int) -> bool:
    """Whether an id that the mask has a bit for is in it."""
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def single_id(mask: Mask) -> int | None:
    """The one id that a mask has; None if it has more, or none."""
    if np.count_nonzero(mask) != 1:
        return None
    word = int(mask.argmax())
    bits = int(mask[word])
    return None if bits & (bits - 1) else 32 * word + bits.bit_length() - 1


def small_id_set(mask: Mask, most: int) -> list[int]:
    """The ids of a mask, in order, if there are no more than `most`; else none."""
    words = np.flatnonzero(mask)
    if len(words) > most:
        return []
    ids = [
        32 * int(word) + bit for word in words for bit in range(32) if int(mask[word]) >> bit & 1
    ]
    return ids if len(ids) <= most else []


class Constraint(Protocol):
    """Token constraint of one session at its current position. Use from one thread at a time.

    Accepted tokens are never taken back; draft tokens are tried and undone.
    """

    @property
    def failure(self) -> str:
        """Why the session cannot go on; empty while it can."""
        ...

    def advance_to(self, output_ids: NDArray[np.int32]) -> None:
        """Move on to what stands behind `output_ids`, all that was emitted so far; those that were
        seen before are not looked at again."""
        ...

    def commit_tokens(self) -> None:
        """Let the draft tokens that were entered stand: they were emitted."""
        ...

    @property
    def current_mask(self) -> Mask | None:
        """What is allowed where it is, if that was asked before; not to be changed."""
        ...

    @property
    def num_mask_words(self) -> int:
        """W."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def matcher(self) -> LLMatcher | None:
        """What is to be asked for the masks of where it is, and of what is drafted from there;
        None: nobody."""
        ...

    @property
    def meter(self) -> MaskMeter | None:
        """What its masks have cost; None: it has no matcher."""
        ...

    def prepare(self, output_ids: NDArray[np.int32]) -> bool:
        """Whether what is allowed behind `output_ids`, all that was emitted so far, is known; if
        not, it is computed in the background from now on. True for a session that has `failed`."""
        ...

    def give_up(self, why: str) -> None:
        """End the session with this reason; its matcher is not touched any more."""
        ...

    def fill_masks(self, masks: NDArray[np.uint32], tokens: Sequence[int]) -> int:
        """Make what `matcher` says of where it is and behind each of k draft tokens, uint32
        [1 + k, W], what is allowed there, in place: up to behind the last token that something can
        follow. How many tokens these are; what further rows say does not matter."""
        ...

    def push_tokens(self, tokens: Sequence[int]) -> int:
        """Step on along draft tokens while something can follow them; how many those are."""
        ...

    def pop_tokens(self, count: int) -> None:
        """Step back so many tokens that were entered; before anything is followed, all."""
        ...

    def forced_tokens(self) -> Sequence[int]:
        """Ids that must follow one another where it is, because nothing else may; as many as are
        known at once."""
        ...


class PathMasks(NamedTuple):
    """Allowed-token masks along draft tokens."""

    masks: NDArray[np.uint32]
    """[1 + k, W]: where the constraint is, and behind each token; anything behind those that
    nothing can follow, or that are not legal."""
    entered: int
    """Tokens that something can follow, before the first one of which that is not so."""


MaskRequest = tuple[Constraint, Sequence[int]]
"""Whose masks are wanted, and along which draft tokens."""


def masks_along_drafts(wishes: Sequence[MaskRequest]) -> list[PathMasks]:
    """What is allowed where each constraint is and along its tokens; each constraint once.

    One call of the library: each gives up the interpreter lock, and to have it back takes as long
    as another thread may keep it, which is ten times what a mask does.
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
    """The tokens before the first one that is no id."""
    return list(itertools.takewhile(lambda token: 0 <= token < vocab_size, tokens))


def is_slow(constraint: Constraint | None) -> bool:
    """Whether the masks of a session take so long that rounds go on without it meanwhile."""
    if constraint is None or (meter := constraint.meter) is None:
        return False
    return meter.is_slow and not constraint.failure


_Asked = tuple[Constraint, int, list[int]]
"""A constraint, the row of its first mask, and the draft tokens along which it is asked."""


def _ask_together(asked: Sequence[_Asked], masks: NDArray[np.uint32]) -> None:
    """Have the masks of constraints written: in one call, but for those that may be expensive."""
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
    """Have the masks of matchers, from these rows on, written."""
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
    """What may follow where a constraint is."""
    mask: Mask = masks_along_drafts([(constraint, ())])[0].masks[0]
    return mask


def masks_of_paths(constraint: Constraint, paths: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """uint32 [P, W]: what may follow each of these paths of draft tokens; anything behind one that
    nothing can follow."""
    masks = np.full((len(paths), constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
    for mask, path in zip(masks, paths, strict=True):
        entered = constraint.push_tokens(path)
        if entered == len(path):
            mask[:] = allowed_mask(constraint)
        constraint.pop_tokens(entered)
    return masks


def allowed_prefix_len(constraint: Constraint, tokens: Sequence[int]) -> int:
    """How many of these draft tokens may follow one another."""
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
