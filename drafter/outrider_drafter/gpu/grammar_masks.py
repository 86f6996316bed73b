"""Grammar masks of one draft launch, and truncation of its drafts to what grammars allow.

A launch drafts all levels without the host, so only what is known before the launch is masked: the
forced tokens at the start of a draft, and the first position with a choice. Letters in shapes: B
rows of a launch; K chain length; A alternative tokens of each level; W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import Constraint, masks_along_drafts, small_id_set
from outrider.grammar.draft_masks import ChainTruncation, ConstrainedTree, run_walks
from outrider.grammar.draft_masks import masks_of_trees as masks_of_trees
from outrider_drafter.proposers.interface import PendingProposal
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_grammars import constraint_of

Masks = NDArray[np.uint32]


class DraftConstraintState(NamedTuple):
    """Constraint of a session at the start of a draft."""

    constraint: Constraint
    path: Sequence[int] = ()
    """Tokens that follow the session's own tokens and precede the draft. A draft for an outcome
    begins after such tokens."""


DraftConstraintStates = Sequence[DraftConstraintState | None]
"""Constraint of each row of a launch; None if the row is not constrained. Several rows may belong
to one session."""


def draft_starts(
    sessions: Sequence[FollowedSession], paths: Sequence[Sequence[int]] | None = None
) -> DraftConstraintStates:
    """Return the constraint of each session at the start of its draft, or None for a session
    without a constraint. The draft of session i starts after the session's tokens and, if `paths`
    is given, after the tokens paths[i]."""
    known = dict[int, Constraint | None]()
    for session in sessions:
        if session.has_constraint and session.slot not in known:
            known[session.slot] = constraint_of(session)
    starts: list[DraftConstraintState | None] = []
    for row, session in enumerate(sessions):
        constraint = known.get(session.slot)
        path = () if paths is None else paths[row]
        starts.append(None if constraint is None else DraftConstraintState(constraint, path))
    return starts


def first_level_masks(starts: DraftConstraintStates, levels: int) -> list[Masks | None]:
    """Return for each row the allowed-token masks of its first n levels, uint32 [n, W] with n <=
    `levels`, or None for rows without a constraint. The masked levels are those with forced tokens
    and the first level with a choice."""
    found: list[Masks | None] = [None] * len(starts)
    for entered in _entered(starts):
        wishes = [(one, one.forced_tokens()[: levels - 1]) for _, one in entered]
        for (row, _), along in zip(entered, masks_along_drafts(wishes), strict=True):
            found[row] = along.masks
    return found


def truncate_chains(
    starts: DraftConstraintStates,
    words: NDArray[np.int32],
    counts: NDArray[np.int64],
    others: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Restrict chains to what their constraints allow, as `ChainTruncation` does, and return the
    new words and counts. A disallowed token is replaced by an allowed alternative, if there is one,
    and the chain ends there. `words` int32 [>= B, K]: tokens; `counts` int64 [B]: length of each
    chain; `others` int32 [>= B, K, A]: alternative tokens, or None. Chains without a constraint are
    unchanged. Do not use this for chains that were drawn from a distribution."""
    bound = [row for row, start in enumerate(starts) if start is not None]
    if not bound:
        return words, counts
    words, counts = words.copy(), counts.copy()
    drafted = {row: words[row, : counts[row]].tolist() for row in bound}
    counts[bound] = 0
    for entered in _entered(starts):
        fits = {
            row: ChainTruncation(one, others=() if others is None else others[row])
            for row, one in entered
            if drafted[row]
        }
        try:
            run_walks([(fit.constraint, fit.truncate(drafted[row])) for row, fit in fits.items()])
        finally:
            for fit in fits.values():
                fit.close()
        for row, fit in fits.items():
            counts[row] = len(fit.tokens)
            words[row, : counts[row]] = fit.tokens
    return words, counts


def _entered(starts: DraftConstraintStates) -> Iterator[list[tuple[int, Constraint]]]:
    """Yield groups of (row, constraint) with the constraints advanced along the rows' paths. Each
    constraint is in a group at most once; rows whose paths violate the constraint are left out."""
    left = [(row, start) for row, start in enumerate(starts) if start is not None]
    while left:
        now = {id(start.constraint): (row, start) for row, start in reversed(left)}
        counts = [
            (row, start, start.constraint.push_tokens(start.path)) for row, start in now.values()
        ]
        try:
            yield [(row, one) for row, (one, path), count in counts if count == len(path)]
        finally:
            for _, start, count in counts:
                start.constraint.pop_tokens(count)
        taken = {row for row, _, _ in counts}
        left = [each for each in left if each[0] not in taken]


def mask_candidates(
    lives: Sequence[PendingProposal],
    tokens: Sequence[NDArray[np.int32]],
    logprobs: Sequence[NDArray[np.float32]],
) -> None:
    """Restrict the candidates of scored proposals to what the sessions' constraints allow, in
    place. `tokens` and `logprobs`: one array [1 + n, c] for each proposal of n nodes, with c
    candidates at the root and at each node. Disallowed candidates get log-prob -inf. The log-probs
    of the others are normalised, and all candidates are sorted, best first."""
    starts = draft_starts([live.session for live in lives])
    bound = [(index, start) for index, start in enumerate(starts) if start is not None]
    trees = [
        ConstrainedTree(start.constraint, lives[index].tree.tokens, lives[index].tree.parents)
        for index, start in bound
    ]
    for (index, _), masks in zip(bound, masks_of_trees(trees), strict=True):
        for place, mask in enumerate(masks):
            _mask_node(mask, tokens[index][place], logprobs[index][place])


def _mask_node(
    mask: NDArray[np.uint32], tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> None:
    """Restrict the candidates [c] of one place to a mask."""
    known = tokens >= 0
    if not known.any():
        # The place was not scored.
        return
    bits = mask[tokens >> 5] >> (tokens & 31).astype(np.uint32) & 1
    allowed_tokens = known & (bits != 0)
    if not allowed_tokens.any():
        # No candidate is allowed. If only a few ids are allowed, they become the candidates.
        few = small_id_set(mask, len(tokens))
        tokens[: len(few)], allowed_tokens[: len(few)], logprobs[:] = few, True, 0.0
    logprobs[~allowed_tokens] = -np.inf
    if allowed_tokens.any():
        logprobs -= np.logaddexp.reduce(logprobs[allowed_tokens])
    best = np.argsort(-logprobs, kind="stable")
    tokens[:], logprobs[:] = tokens[best], logprobs[best]
