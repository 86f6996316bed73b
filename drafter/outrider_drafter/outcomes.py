"""Which outcomes of a proposal are worth a draft (pure).

A proposal has n nodes and 1 + n places: place 0 is the root, place i + 1 node i. A verdict ends at
a place, with a token that is none of its children; c candidates for it are known at each place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.tree import DraftTree

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


class Layout(NamedTuple):
    """How a proposal's nodes lie among the candidates."""

    tree: DraftTree
    tokens: NDArray[np.int32]
    """[1 + n, c]: candidates of each place, best first."""
    depths: Indices
    """[1 + n]: tokens between the root and each place."""
    ranks: Indices
    """[n]: which of its parent's candidates a node is; c where it is none."""
    is_child: NDArray[np.bool_]
    """[1 + n, c]: candidates that are nodes of the proposal."""

    @classmethod
    def of(cls, tree: DraftTree, tokens: NDArray[np.int32]) -> Layout:
        """The layout of a tree with these candidates [1 + n, c]."""
        above = tree.parents + 1
        same = tokens[above] == tree.tokens[:, None]
        found = same.any(axis=1)
        ranks = np.where(found, same.argmax(axis=1), tokens.shape[1])
        is_child = np.zeros(tokens.shape, dtype=np.bool_)
        is_child[above[found], ranks[found]] = True
        depths = [0] * (len(tree) + 1)
        for place, parent in enumerate(above.tolist(), start=1):
            depths[place] = depths[parent] + 1
        return cls(tree, tokens, np.array(depths), ranks, is_child)

    def reach(self, stands: Floats) -> Floats:
        """[1 + n]: probability that a verdict's path comes to each place; `stands` [n]: that a node
        stands once its parent was reached."""
        result, chances = [1.0] * (len(self.tree) + 1), stands.tolist()
        for node, parent in enumerate(self.tree.parents.tolist()):
            result[node + 1] = result[parent + 1] * chances[node]
        return np.array(result)


class Chosen(NamedTuple):
    """Outcomes of one proposal, best first; [K] each."""

    nodes: Indices
    tokens: NDArray[np.int32]
    gains: Floats
    """Expected: the probability of each outcome, as far as it is known."""


def best(layout: Layout, gains: Floats, *, room: int, count: int) -> Chosen:
    """Up to `count` outcomes by expected gain [1 + n, c]; those that cannot be are left out:
    children of the place, and what leaves no `room` (levels that the proposal itself has room for)
    for a draft of one level. Ties go to the lower place, then to the lower candidate."""
    possible = np.where(layout.is_child, 0.0, gains)
    possible[layout.depths > room - 2] = 0.0
    flat = possible.ravel()
    if 0 < count < len(flat):
        # Not argpartition: which of equal ones it takes is not defined.
        least = np.partition(flat, -count)[-count]
        found = np.flatnonzero((flat >= least) & (flat > 0.0))
    else:
        found = np.flatnonzero(flat > 0.0)
    order = found[np.argsort(-flat[found], kind="stable")][: max(count, 0)]
    places, columns = np.divmod(order, layout.tokens.shape[1])
    return Chosen(places - 1, layout.tokens[places, columns], flat[order])


class Seen(NamedTuple):
    """What a verdict showed of a proposal: the places that its path reached, and what followed."""

    places: Indices
    """[m], the root first."""
    columns: Indices
    """[m]: which candidate of the place was emitted; -1: none of them."""
    stood: NDArray[np.bool_]
    """[m]: whether that is a child, on whose side the path went on."""


def seen(layout: Layout, emitted: Iterable[int]) -> Seen:
    """Follow the emitted tokens through a proposal, as far as they lead."""
    below = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(layout.tree.parents.tolist(), layout.tree.tokens.tolist(), strict=True)
        )
    }
    places: list[int] = []
    columns: list[int] = []
    stood: list[bool] = []
    node = -1
    for token in emitted:
        candidates = layout.tokens[node + 1].tolist()
        places.append(node + 1)
        columns.append(candidates.index(token) if token in candidates else -1)
        child = below.get((node, token))
        stood.append(child is not None)
        if child is None:
            break
        node = child
    return Seen(
        np.array(places, dtype=np.int64),
        np.array(columns, dtype=np.int64),
        np.array(stood, dtype=np.bool_),
    )
