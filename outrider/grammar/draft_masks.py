"""Allowed-token masks along the drafts of many sessions, computed together.

Each session walks along its draft; the masks that all walks need at a time are computed in one
call. N nodes of a tree; masks as in `outrider.grammar.constraint`.
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
"""Steps of one constraint; it yields the draft tokens along which it wants to know, from where the
constraint is, and is sent what is allowed there."""


def run_walks(walks: Sequence[tuple[Constraint, ConstraintWalk]]) -> None:
    """Take all walks to their ends."""
    wishes = [(constraint, walk, _wish(walk, None)) for constraint, walk in walks]
    while wishes := [wish for wish in wishes if wish[2] is not None]:
        found = masks_along_drafts([(constraint, tokens or ()) for constraint, _, tokens in wishes])
        wishes = [
            (constraint, walk, _wish(walk, walk_tree))
            for (constraint, walk, _), walk_tree in zip(wishes, found, strict=True)
        ]


def _wish(walk: ConstraintWalk, along: PathMasks | None) -> Sequence[int] | None:
    """Send what is allowed (None: begin); along what it wants to know next, None: nothing."""
    try:
        return next(walk) if along is None else walk.send(along)
    except StopIteration:
        return None


class ConstrainedTree(NamedTuple):
    """Draft nodes that follow a constraint's position; parents before their children."""

    constraint: Constraint
    tokens: NDArray[np.int32]
    """[N]."""
    parents: NDArray[np.int32]
    """[N]; ROOT: none."""


def masks_of_trees(trees: Sequence[ConstrainedTree]) -> list[NDArray[np.uint32]]:
    """uint32 [1 + N, W] of each: what may follow the root, and each node.

    Below an id that is not legal itself it says anything: nothing there can stand.
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
    """Through a tree and back, noting in masks [1 + N, W] what is allowed where it comes: from a
    node on along the first children, as far as there are any, then along those of the nodes
    above."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    ids, path = tree.tokens.tolist(), list[int]()
    left = [(0, node) for node in reversed(below.get(ROOT, ()))]
    """Nodes that were not come to, and how many are above each."""
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
    """Restricts a chain that was drafted in one piece to what its constraint allows.

    Where the grammar leaves one id, that is the draft, whatever was drafted; where it leaves more,
    the best of those that might have been drafted there. What was drafted behind a replaced token
    is not looked at, for it was drafted behind another one.
    """

    def __init__(self, constraint: Constraint, *, others: Sequence[Sequence[int]] = ()) -> None:
        """others: what else might have been drafted at each level, best first."""
        self.constraint = constraint
        self.tokens: list[int] = []
        """Those that are settled."""
        self._others = others
        self._entered = 0

    def truncate(self, drafted: Sequence[int]) -> ConstraintWalk:
        """Settle what may be of a chain; it ends early where something else would have to be
        drafted. What may follow the whole chain nobody asks."""
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
        """Settle what is allowed of these tokens; what may follow that, None: nothing."""
        taken = 0
        for mask, token in zip(seen.masks[: 1 + seen.entered], ahead, strict=False):
            if not 0 <= token < self.constraint.vocab_size or not is_allowed(mask, token):
                break
            self.tokens.append(token)
            taken += 1
        behind: Mask | None = seen.masks[taken] if taken <= seen.entered else None
        return behind

    def _instead(self, mask: Mask, others: Sequence[Sequence[int]]) -> int | None:
        """What may stand behind what is settled: what must, or one of the others (none or one
        sequence of them); None: that is open."""
        most = self.constraint.vocab_size
        only = single_id(mask)
        if only is not None:
            return only
        inside = (int(i) for each in others for i in each if 0 <= i < most)
        return next((i for i in inside if is_allowed(mask, i)), None)

    def _replace(self, token: int, *, of: int) -> bool:
        """Settle a token that was not drafted; whether anything is wanted of what follows it, of
        so many in all."""
        self.tokens.append(token)
        if len(self.tokens) == of:
            return False
        self._entered += self.constraint.push_tokens(self.tokens[self._entered :])
        return self._entered == len(self.tokens)

    def close(self) -> None:
        """Lead the constraint back."""
        self.constraint.pop_tokens(self._entered)
        self._entered = 0
