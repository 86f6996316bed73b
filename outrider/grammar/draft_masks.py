"""Allowed-token masks along the drafts of many sessions, computed together.

A generator for each session walks along the session's draft and yields requests for masks. The
requests of all sessions are computed in one call. In shapes, N is the number of nodes of a tree;
masks are those of `outrider.grammar.constraint`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import (
    ALL_TOKENS,
    Constraint,
    Mask,
    PathMasks,
    is_allowed,
    masks_along_drafts,
    single_id,
)
from outrider.spec.tree import ROOT

ConstraintWalk = Generator[Sequence[int], PathMasks, None]
"""Generator that walks along the draft of one constraint. It yields the draft tokens, from the
constraint's current position on, along which it needs masks, and is sent their `PathMasks`."""


def run_walks(walks: Sequence[tuple[Constraint, ConstraintWalk]]) -> None:
    """Run all walks to their ends. The masks that they request at the same time are computed
    together."""
    wishes = [(constraint, walk, _wish(walk, None)) for constraint, walk in walks]
    while wishes := [wish for wish in wishes if wish[2] is not None]:
        found = masks_along_drafts([(constraint, tokens or ()) for constraint, _, tokens in wishes])
        wishes = [
            (constraint, walk, _wish(walk, walk_tree))
            for (constraint, walk, _), walk_tree in zip(wishes, found, strict=True)
        ]


def _wish(walk: ConstraintWalk, along: PathMasks | None) -> Sequence[int] | None:
    """Send masks to a walk, or start the walk if `along` is None.

    Returns the draft tokens of its next request, or None at its end.
    """
    try:
        return next(walk) if along is None else walk.send(along)
    except StopIteration:
        return None


class ConstrainedTree(NamedTuple):
    """Draft tree below a constraint's current position. Parents come before their children."""

    constraint: Constraint
    tokens: NDArray[np.int32]
    """Token of each node, int32 [N]."""
    parents: NDArray[np.int32]
    """Index of each node's parent, int32 [N]; ROOT for children of the root."""


def masks_of_trees(trees: Sequence[ConstrainedTree]) -> list[NDArray[np.uint32]]:
    """Return the masks of each tree, uint32 [1 + N, W]. Row 0 is the mask after the root, and row i
    + 1 the mask after node i.

    The rows of nodes below a token that is not allowed are not meaningful, because no such node can
    be accepted.
    """
    found = [
        np.full((1 + len(tree.tokens), tree.constraint.num_mask_words), ALL_TOKENS, dtype=np.uint32)
        for tree in trees
    ]
    run_walks(
        [
            (tree.constraint, walk_tree(tree, masks))
            for tree, masks in zip(trees, found, strict=True)
        ]
    )
    return found


def walk_tree(tree: ConstrainedTree, masks: NDArray[np.uint32]) -> ConstraintWalk:
    """Walk through a tree and write its masks into `masks` [1 + N, W]: row 0 after the root, row i
    + 1 after node i.

    The walk follows first children down to a leaf, then continues with the remaining children of
    the nodes above. At the end the constraint is at its original position again.
    """
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    ids, path = tree.tokens.tolist(), list[int]()
    left = [(0, node) for node in reversed(below.get(ROOT, ()))]
    """Nodes that were not visited yet, each with the number of its ancestors."""
    entered = 0
    if not left:
        masks[0] = (yield ()).masks[0]
    while left:
        depth, node = left.pop()
        if entered > depth:
            tree.constraint.pop_tokens(entered - depth)
        else:
            tree.constraint.push_tokens([ids[each] for each in path[entered:depth]])
        entered, path = depth, [*path[:depth], node]
        while path[-1] in below:
            path.append(below[path[-1]][0])
        seen = yield [ids[each] for each in path[depth:]]
        masks[0 if not depth else path[depth - 1] + 1] = seen.masks[0]
        known = depth + seen.entered
        for place, each in enumerate(path[depth:known]):
            masks[each + 1] = seen.masks[1 + place]
            others = below.get(each, ())[1:]
            left += [(depth + place + 1, other) for other in reversed(others)]
    tree.constraint.pop_tokens(entered)


class ChainTruncation:
    """Restricts a drafted chain of tokens to those that a constraint allows.

    Where the constraint allows a single id, that id replaces the drafted token. Where it allows
    several ids but not the drafted token, the best allowed alternative replaces the drafted token.
    The drafted tokens after a replacement are dropped, because they were drafted to follow another
    token.
    """

    def __init__(self, constraint: Constraint, *, others: Sequence[Sequence[int]] = ()) -> None:
        """Create an object for one chain of one constraint.

        `others` holds the alternative draft tokens of each level of the chain, best first.
        """
        self.constraint = constraint
        self.tokens: list[int] = []
        """Tokens of the restricted chain so far."""
        self._others = others
        self._entered = 0

    def truncate(self, drafted: Sequence[int]) -> ConstraintWalk:
        """Walk along a drafted chain and add the allowed tokens to `tokens`.

        `tokens` may become shorter than `drafted`: it ends where the drafter would have to draft
        another token. The mask after the last token of the chain is not requested.
        """
        ahead = drafted
        while True:
            last = len(self.tokens) + len(ahead) == len(drafted)
            seen = yield ahead[: len(ahead) - last] if ahead else ()
            behind = self._take(ahead, seen)
            if behind is None or len(self.tokens) == len(drafted):
                return
            # What follows a replaced token was not drafted behind it, nor were the others there.
            others = self._others[len(self.tokens) :][:1] if ahead is drafted else ()
            token = self._instead(behind, others)
            if token is None or not self._replace(token, of=len(drafted)):
                return
            ahead = self.constraint.forced_tokens()[: len(drafted) - len(self.tokens)]

    def _take(self, ahead: Sequence[int], seen: PathMasks) -> Mask | None:
        """Add the leading allowed tokens of `ahead` to `tokens`.

        Returns the mask after them, or None if nothing can follow.
        """
        taken = 0
        for mask, token in zip(seen.masks[: 1 + seen.entered], ahead, strict=False):
            if not 0 <= token < self.constraint.vocab_size or not is_allowed(mask, token):
                break
            self.tokens.append(token)
            taken += 1
        behind: Mask | None = seen.masks[taken] if taken <= seen.entered else None
        return behind

    def _instead(self, mask: Mask, others: Sequence[Sequence[int]]) -> int | None:
        """Return the replacement at a mask: its single allowed id, else the first allowed
        alternative. `others` holds no or one sequence of alternatives. Returns None if there is no
        replacement."""
        most = self.constraint.vocab_size
        only = single_id(mask)
        if only is not None:
            return only
        inside = (int(i) for each in others for i in each if 0 <= i < most)
        return next((i for i in inside if is_allowed(mask, i)), None)

    def _replace(self, token: int, *, of: int) -> bool:
        """Add a replacement token.

        Returns whether the chain, of at most `of` tokens, can continue after it.
        """
        self.tokens.append(token)
        if len(self.tokens) == of:
            return False
        self._entered += self.constraint.push_tokens(self.tokens[self._entered :])
        return self._entered == len(self.tokens)

    def close(self) -> None:
        """Return the constraint to its original position."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0
