"""Walks along drafts of many sessions, side by side: all masks that are wanted at a time are worked
out together.

N nodes of a tree; masks as in `outrider.grammar.constraint`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.grammar.constraint import ALL, Constraint, Mask, allows, legal_of, only_id
from outrider.spec.tree import ROOT

Walk = Generator[None, Mask, None]
"""Steps of one constraint; it yields where it wants the mask of where that is, and is sent it."""


def side_by_side(walks: Sequence[tuple[Constraint, Walk]]) -> None:
    """Take all walks to their ends."""
    wanting = [(constraint, walk) for constraint, walk in walks if _wants(walk, None)]
    while wanting:
        masks = legal_of([constraint for constraint, _ in wanting])
        wanting = [
            (constraint, walk)
            for (constraint, walk), mask in zip(wanting, masks, strict=True)
            if _wants(walk, mask)
        ]


def _wants(walk: Walk, mask: Mask | None) -> bool:
    """Send a mask (None: begin); whether it wants another one."""
    try:
        if mask is None:
            next(walk)
        else:
            walk.send(mask)
    except StopIteration:
        return False
    return True


class DraftTree(NamedTuple):
    """Draft nodes behind where a constraint is; parents before their children."""

    constraint: Constraint
    tokens: NDArray[np.int32]
    """[N]."""
    parents: NDArray[np.int32]
    """[N]; ROOT: none."""


def masks_of(trees: Sequence[DraftTree]) -> list[NDArray[np.uint32]]:
    """uint32 [1 + N, W] of each: what may follow the root, and each node.

    Below an id that is not legal itself it says anything: nothing there can stand.
    """
    found = [
        np.full((1 + len(tree.tokens), tree.constraint.words), ALL, dtype=np.uint32)
        for tree in trees
    ]
    side_by_side(
        [(tree.constraint, along(tree, masks)) for tree, masks in zip(trees, found, strict=True)]
    )
    return found


def along(tree: DraftTree, masks: NDArray[np.uint32]) -> Walk:
    """Depth first through a tree and back, noting in masks [1 + N, W] what is legal where it comes.
    Each node is entered once, left once."""
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        below.setdefault(parent, []).append(node)
    ids = tree.tokens.tolist()
    masks[0] = yield
    path = [list(reversed(below.get(ROOT, ())))]
    while path:
        if not path[-1]:
            path.pop()
            if path:
                tree.constraint.leave(1)
            continue
        node = path[-1].pop()
        if tree.constraint.enter(ids[node]):
            masks[node + 1] = yield
            path.append(list(reversed(below.get(node, ()))))


class ChainFit:
    """What of a drafted chain may stand.

    Where the grammar leaves one id, that is the draft, whatever was drafted; what was drafted
    behind a replaced token is not looked at, for it was drafted behind another one.
    """

    def __init__(
        self, constraint: Constraint, *, force: bool = True, verified: bool = True
    ) -> None:
        """force: whether tokens may be replaced; verified: whether the mask behind the last token
        is wanted, too."""
        self.constraint = constraint
        self.tokens: list[int] = []
        """Those that are settled."""
        self.masks: list[Mask] = []
        """What may follow the root, and each settled token behind which there is anything."""
        self.ended = False
        """Whether nothing may follow the last one."""
        self._force, self._verified = force, verified
        self._entered = 0

    def settle(self, drafted: Sequence[int]) -> Walk:
        """Go on behind what is settled, by the ids of the whole chain; it ends early where
        something else would have to be drafted."""
        if not self.masks:
            self.masks.append((yield))
        stale = False
        while not self.ended and len(self.tokens) < len(drafted):
            token = drafted[len(self.tokens)]
            if stale or token < 0 or not allows(self.masks[-1], token):
                forced = only_id(self.masks[-1]) if self._force else None
                if forced is None:
                    return
                token, stale = forced, True
            self.tokens.append(token)
            if not self._verified and len(self.tokens) == len(drafted):
                return
            if self.constraint.enter(token):
                self._entered += 1
                self.masks.append((yield))
            else:
                self.ended = True

    def close(self) -> None:
        """Lead the constraint back."""
        self.constraint.leave(self._entered)
        self._entered = 0
