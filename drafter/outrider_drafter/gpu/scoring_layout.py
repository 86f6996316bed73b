"""Layout of pending proposals' nodes in a scoring launch, and the paths to their outcomes.

A place is the root or a node of a proposal. Letters in shapes: O outcomes; P places of all
proposals; n nodes of one proposal; B proposals of a launch; N nodes of a proposal in the launch.
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
    """Nodes of a pending proposal, and the row of each node in the output of a scoring launch."""

    tree: DraftTree
    nodes: ProposalShape
    node_rows: Indices
    """[1 + n]: row of the root, which is 0, and of each of the n nodes; NO_ROW for nodes that are
    not scored."""

    @classmethod
    def of_tree(cls, tree: DraftTree) -> ProposalRange:
        """Assign output rows to the nodes of a draft tree. If the tree has more nodes than any
        captured shape, only the nodes with the highest log-probs are scored."""
        nodes = proposal_shape(len(tree), chain=is_chain(tree.parents))
        places = np.arange(1 + len(tree))
        if len(tree) > nodes.num_nodes:
            # Log-probs never rise on a path, so a node is never kept without its parent.
            kept = (-tree.logprobs).argsort(kind="stable")[: nodes.num_nodes]
            places[1:] = NO_ROW
            places[1 + np.sort(kept)] = 1 + np.arange(nodes.num_nodes)
        return cls(tree, nodes, places)

    def write_row(self, row: int, tokens: NDArray[np.int32], parents: NDArray[np.int32]) -> None:
        """Write the nodes into row `row` of the launch inputs `tokens` and `parents` [B, N]; see
        `ProposalNodes`."""
        there = np.flatnonzero(self.node_rows[1:] != NO_ROW)
        slots = self.node_rows[1:][there] - 1
        tokens[row, slots] = self.tree.tokens[there]
        parents[row, slots] = self.node_rows[self.tree.parents[there] + 1] - 1


class OutcomePaths(NamedTuple):
    """Paths from the roots of proposals to O outcomes. An outcome is the last accepted node and the
    token after it. D is the depth of the deepest proposal."""

    is_scored: NDArray[np.bool_]
    """[O]: whether the outcome's node was scored."""
    depths: Indices
    """[O]: number of accepted nodes on the path."""
    tokens: NDArray[np.int32]
    """[O, D + 1]: tokens of the accepted nodes, then the outcome's token, then -1."""
    rows: Indices
    """[O, D + 1]: row, in `ProposalScorer.held`, of the feature of the root or node before each
    token. Elements after the outcome's token hold the row of some place on the path."""


class ScoredRows:
    """Finds the features of the root and nodes on the path to an outcome, as rows of
    `ProposalScorer.held`. It covers all proposals that were scored together."""

    def __init__(self, places: NodeIndex, rows: Indices) -> None:
        """Build the index. `places`: roots and nodes of all proposals. `rows` [P]: row of each
        place in `ProposalScorer.held`; NO_ROW if the place has none."""
        self._roots, self._depths = places.roots, places.depths
        self._known = rows != NO_ROW
        lineage = [np.arange(len(rows))]
        for _ in range(int(places.depths.max(initial=0))):
            lineage.append(places.parent_indices[lineage[-1]])
        # The ancestor at each depth; beyond its own depth the place itself.
        back = np.maximum(places.depths[:, None] - np.arange(len(lineage)), 0)
        line = np.stack(lineage)[back, lineage[0][:, None]]
        self._rows = rows[line]
        self._tokens: NDArray[np.int32] = np.full(line.shape, -1, dtype=np.int32)
        self._tokens[:, :-1] = np.where(back[:, :-1] > 0, places.node_tokens[line[:, 1:]], -1)

    def find_paths(self, lives: Indices, nodes: Indices, tokens: Indices) -> OutcomePaths:
        """Return the paths to O outcomes. The arguments are [O]: `lives`, the index of each
        outcome's proposal; `nodes`, its last accepted node (ROOT if none); `tokens`, the token
        after that node."""
        at = self._roots[lives] + 1 + nodes
        depths, path = self._depths[at], self._tokens[at]
        path[np.arange(len(at)), depths] = tokens
        return OutcomePaths(self._known[at], depths, path, self._rows[at])


assert ROOT == -1, "a root comes right before its first node"
