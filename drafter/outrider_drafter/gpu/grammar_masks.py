"""Drafts of one launch for sessions in a grammar: the masks that it begins with, and what may stand
of the chains that come back.

A launch drafts all levels by itself, so what is known before it is masked: what must follow where a
draft begins, up to the first place that is open. K chain length, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import Constraint, few_ids, masks_along
from outrider.grammar.draft_masks import ChainFit, DraftTree, side_by_side
from outrider.grammar.draft_masks import masks_of as masks_of_trees
from outrider_drafter.proposers.interface import Live
from outrider_drafter.state.session import Session
from outrider_drafter.state.session_grammars import constraint_of

Masks = NDArray[np.uint32]


class Start(NamedTuple):
    """Where a draft begins."""

    constraint: Constraint
    path: Sequence[int] = ()
    """Draft tokens behind what the session has."""


Starts = Sequence[Start | None]
"""By row of a launch; None: anything may be drafted there. Several may be of one session."""


def starts_of(sessions: Sequence[Session], paths: Sequence[Sequence[int]] | None = None) -> Starts:
    """Where drafts for these begin, each behind its path if there are any."""
    known = dict[int, Constraint | None]()
    for session in sessions:
        if session.constrained and session.slot not in known:
            known[session.slot] = constraint_of(session)
    starts: list[Start | None] = []
    for row, session in enumerate(sessions):
        constraint = known.get(session.slot)
        path = () if paths is None else paths[row]
        starts.append(None if constraint is None else Start(constraint, path))
    return starts


def first_masks(starts: Starts, levels: int) -> list[Masks | None]:
    """uint32 [<= levels, W] by row: what may be drafted at the first levels."""
    found: list[Masks | None] = [None] * len(starts)
    for entered in _entered(starts):
        wishes = [(one, one.forced()[: levels - 1]) for _, one in entered]
        for (row, _), along in zip(entered, masks_along(wishes), strict=True):
            found[row] = along.masks
    return found


def fit_chains(
    starts: Starts,
    words: NDArray[np.int32],
    counts: NDArray[np.int64],
    others: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Chains: tokens words int32 [>= B, K], as many of each as counts int64 [B] say, and what else
    might have been drafted, int32 [>= B, K, A]. Of those that begin in a grammar, what may stand
    there (`ChainFit`); nothing where the grammar does not lead. Not for draws from a law."""
    bound = [row for row, start in enumerate(starts) if start is not None]
    if not bound:
        return words, counts
    words, counts = words.copy(), counts.copy()
    drafted = {row: words[row, : counts[row]].tolist() for row in bound}
    counts[bound] = 0
    for entered in _entered(starts):
        fits = {
            row: ChainFit(one, others=() if others is None else others[row])
            for row, one in entered
            if drafted[row]
        }
        try:
            side_by_side([(fit.constraint, fit.settle(drafted[row])) for row, fit in fits.items()])
        finally:
            for fit in fits.values():
                fit.close()
        for row, fit in fits.items():
            counts[row] = len(fit.tokens)
            words[row, : counts[row]] = fit.tokens
    return words, counts


def _entered(starts: Starts) -> Iterator[list[tuple[int, Constraint]]]:
    """Rows and their constraints, which have entered their paths; each constraint once at a time,
    rows whose paths lead nowhere left out."""
    left = [(row, start) for row, start in enumerate(starts) if start is not None]
    while left:
        now = {id(start.constraint): (row, start) for row, start in reversed(left)}
        counts = [(row, start, start.constraint.enter(start.path)) for row, start in now.values()]
        try:
            yield [(row, one) for row, (one, path), count in counts if count == len(path)]
        finally:
            for _, start, count in counts:
                start.constraint.leave(count)
        taken = {row for row, _, _ in counts}
        left = [each for each in left if each[0] not in taken]


def mask_scores(
    lives: Sequence[Live],
    tokens: Sequence[NDArray[np.int32]],
    logprobs: Sequence[NDArray[np.float32]],
) -> None:
    """Let scores of proposals, [1 + n, c] each, know of grammars, in place: what is not legal
    behind a place has no probability, the rest all of it; best first."""
    starts = starts_of([live.session for live in lives])
    bound = [(index, start) for index, start in enumerate(starts) if start is not None]
    trees = [
        DraftTree(start.constraint, lives[index].tree.tokens, lives[index].tree.parents)
        for index, start in bound
    ]
    for (index, _), masks in zip(bound, masks_of_trees(trees), strict=True):
        for place, mask in enumerate(masks):
            _mask_place(mask, tokens[index][place], logprobs[index][place])


def _mask_place(
    mask: NDArray[np.uint32], tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> None:
    """Candidates [c] of one place."""
    known = tokens >= 0
    if not known.any():
        # It was not scored.
        return
    bits = mask[tokens >> 5] >> (tokens & 31).astype(np.uint32) & 1
    legal = known & (bits != 0)
    if not legal.any():
        # The head thinks of none of them. Of a few each may be next.
        few = few_ids(mask, len(tokens))
        tokens[: len(few)], legal[: len(few)], logprobs[:] = few, True, 0.0
    logprobs[~legal] = -np.inf
    if legal.any():
        logprobs -= np.logaddexp.reduce(logprobs[legal])
    best = np.argsort(-logprobs, kind="stable")
    tokens[:], logprobs[:] = tokens[best], logprobs[best]
