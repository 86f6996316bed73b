"""Layout of pending proposals' nodes in a scoring launch, and the paths to their outcomes. Pure.

O outcomes; B, N as in `ProposalNodes`; P places: the root and the nodes of a proposal.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.tree import ROOT, DraftTree, is_chain
from outrider_drafter.gpu.shapes import ProposalShape, proposal_shape
from outrider_drafter.state.outcomes import NodeIndex

NO_ROW: Final = -1
Indices = NDArray[np.int64]


class ProposalRange(NamedTuple):
    """A proposal's nodes among the places of what is scored."""

    tree: DraftTree
    nodes: ProposalShape
    node_rows: Indices
    """[1 + n]: 0 for the root (entry 0), from 1 on for nodes; NOWHERE for one that is not
    scored."""

    @classmethod
    def of_tree(cls, tree: DraftTree) -> ProposalRange:
        """Of a tree or chain with too many nodes those of the highest log-prob are kept."""
        nodes = proposal_shape(len(tree), chain=is_chain(tree.parents))
        places = np.arange(1 + len(tree))
        if len(tree) > nodes.num_nodes:
            # Log-probs never rise on a path, so nothing stays below a node that does not.
            kept = (-tree.logprobs).argsort(kind="stable")[: nodes.num_nodes]
            places[1:] = NO_ROW
            places[1 + np.sort(kept)] = 1 + np.arange(nodes.num_nodes)
        return cls(tree, nodes, places)

    def write_row(self, row: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        """Write the nodes as row `row` of a batch: tokens, parents [B, N] as in `ProposalNodes`."""
        there = np.flatnonzero(self.node_rows[1:] != NO_ROW)
        slots = self.node_rows[1:][there] - 1
        tokens[row, slots] = self.tree.tokens[there]
        parents[row, slots] = self.node_rows[self.tree.parents[there] + 1] - 1


class OutcomePaths(NamedTuple):
    """From the live rows down to outcomes."""

    is_scored: NDArray[np.bool_]
    """[O]: whether the outcome's node was scored."""
    depths: Indices
    """[O]: nodes of the path; the outcome's token comes after them."""
    tokens: NDArray[np.int32]
    """[O, D + 1]: the path's tokens and the outcome's; -1 behind it. D levels of the deepest
    proposal."""
    rows: Indices
    """[O, D + 1]: held row of the place above each of these; some place of the path behind it."""


class ScoredRows:
    """Rows of all proposals that were scored together, in the held features."""

    def __init__(self, places: NodeIndex, rows: Indices) -> None:
        """rows [P]: the held row of every place; NOWHERE of those without."""
        self._roots, self._depths = places.roots, places.depths
        self._known = rows != NO_ROW
        lineage = [np.arange(len(rows))]
        for _ in range(int(places.depths.max(initial=0))):
            lineage.append(places.parent_indices[lineage[-1]])
        # The ancestor at each depth; the place itself behind it.
        back = np.maximum(places.depths[:, None] - np.arange(len(lineage)), 0)
        line = np.stack(lineage)[back, lineage[0][:, None]]
        self._rows = rows[line]
        self._tokens: NDArray[np.int32] = np.full(line.shape, -1, dtype=np.int32)
        self._tokens[:, :-1] = np.where(back[:, :-1] > 0, places.node_tokens[line[:, 1:]], -1)

    def find_paths(self, lives: Indices, nodes: Indices, tokens: Indices) -> OutcomePaths:
        """The paths to outcomes, all [O]: proposal, node (ROOT: none), token that follows it."""
        at = self._roots[lives] + 1 + nodes
        depths, path = self._depths[at], self._tokens[at]
        path[np.arange(len(at)), depths] = tokens
        return OutcomePaths(self._known[at], depths, path, self._rows[at])


assert ROOT == -1, "a root comes right before its first node"
