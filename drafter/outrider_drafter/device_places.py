"""Where the nodes of live proposals stand on a device, and the paths that branches take (pure).

O outcomes, D levels of the deepest of them; B, N as in `GivenNodes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.tree import ROOT, DraftTree, is_chain
from outrider_drafter.device_shapes import Nodes, nodes_of

NOWHERE: Final = -1
Indices = NDArray[np.int64]


class Placed(NamedTuple):
    """A proposal's nodes among the places of what is scored."""

    tree: DraftTree
    nodes: Nodes
    places: Indices
    """[1 + n]: 0 for the root (entry 0), from 1 on for nodes; NOWHERE for one that is not
    scored."""

    @classmethod
    def of(cls, tree: DraftTree) -> Placed:
        """Of a tree or chain with too many nodes those of the highest log-prob are kept."""
        nodes = nodes_of(len(tree), chain=is_chain(tree.parents))
        places = np.arange(1 + len(tree))
        if len(tree) > nodes.num_nodes:
            # Log-probs never rise on a path, so nothing stays below a node that does not.
            kept = (-tree.logprobs).argsort(kind="stable")[: nodes.num_nodes]
            places[1:] = NOWHERE
            places[1 + np.sort(kept)] = 1 + np.arange(nodes.num_nodes)
        return cls(tree, nodes, places)

    def fill(self, row: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        """Write the nodes as row `row` of a batch: tokens, parents [B, N] as in `GivenNodes`."""
        there = np.flatnonzero(self.places[1:] != NOWHERE)
        slots = self.places[1:][there] - 1
        tokens[row, slots] = self.tree.tokens[there]
        parents[row, slots] = self.places[self.tree.parents[there] + 1] - 1


class Paths(NamedTuple):
    """From the live rows down to outcomes."""

    known: NDArray[np.bool_]
    """[O]: whether the outcome's node was scored."""
    depths: Indices
    """[O]: nodes of the path; the outcome's token comes after them."""
    tokens: NDArray[np.int32]
    """[O, D + 1]: the path's tokens and the outcome's; -1 behind it."""
    rows: Indices
    """[O, D + 1]: held row of the place above each of these; some place of the path behind it."""


class ScoredPlaces:
    """The places of all proposals that were scored together, as rows of what is held."""

    def __init__(self, trees: Sequence[tuple[DraftTree, Indices]]) -> None:
        """Proposals with the held row [1 + n] of every place; NOWHERE of those without."""
        sizes = np.array([1 + len(tree) for tree, _ in trees], dtype=np.int64)
        self._firsts: Indices = sizes.cumsum() - sizes
        """[proposals]: where the root of each is among all nodes."""
        self._parents = np.empty(int(sizes.sum()), dtype=np.int64)
        self._tokens = np.full(len(self._parents), -1, dtype=np.int32)
        for first, (tree, _) in zip(self._firsts.tolist(), trees, strict=True):
            end = first + 1 + len(tree)
            self._parents[first] = first
            self._parents[first + 1 : end] = tree.parents + (first + 1)
            self._tokens[first + 1 : end] = tree.tokens
        self._rows = np.concatenate([rows for _, rows in trees])

    def paths(self, lives: Indices, nodes: Indices, tokens: Indices) -> Paths:
        """The paths to outcomes, all [O]: proposal, node (ROOT: none), token that follows it."""
        roots = self._firsts[lives]
        above = [roots + 1 + nodes]
        while bool((above[-1] != roots).any()):
            above.append(self._parents[above[-1]])
        lineage = np.stack(above)
        depths: Indices = (lineage != roots).sum(axis=0)
        # The ancestor at each depth; the node itself behind it.
        back = np.maximum(depths[:, None] - np.arange(len(lineage)), 0)
        owner = np.arange(len(lives))
        line = lineage[back, owner[:, None]]
        path: NDArray[np.int32] = np.full(line.shape, -1, dtype=np.int32)
        path[:, :-1] = np.where(back[:, :-1] > 0, self._tokens[line[:, 1:]], -1)
        path[owner, depths] = tokens
        return Paths(self._rows[above[0]] != NOWHERE, depths, path, self._rows[line])


assert ROOT == -1, "a root comes right before its first node"
