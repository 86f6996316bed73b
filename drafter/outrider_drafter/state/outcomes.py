"""Outcomes (accepted path, next token) of proposals, ranked by expected gain. Pure.

A proposal of n nodes has 1 + n places: its root, then its nodes. A verdict ends at a place, with a
token that is none of its children; c candidates for it are known at each place. P places of some
proposals, one proposal after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import extend_digests
from outrider.spec.tree import DraftTree

OUTCOME_BATCH_SIZES: Final = (4, 16, 32, 64)
"""Outcomes that one launch drafts for: a device fills up what is less."""
_WORTH: Final = 0.004
"""Gain of an outcome that pays for its row of a launch: a hit saves some 2 ms of a GPU's time, a
row of a larger launch costs 10 to 30 us, of which some is hidden behind the verify round."""

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


class NodeIndex(NamedTuple):
    """How the nodes of some proposals lie, whatever may follow them."""

    roots: Indices
    """[L]: the first place of each proposal."""
    parent_indices: Indices
    """[P]: the place above each; of a root, itself."""
    node_tokens: NDArray[np.int32]
    """[P]: the token of each node; of a root, -1."""
    depths: Indices
    """[P]: tokens between the root and each place."""

    @classmethod
    def of_trees(cls, trees: Sequence[DraftTree]) -> NodeIndex:
        """The places of proposals."""
        sizes = np.array([len(tree) + 1 for tree in trees], dtype=np.int64)
        roots = sizes.cumsum() - sizes
        above = roots.repeat(sizes)
        nodes = np.ones(len(above), dtype=np.bool_)
        nodes[roots] = False
        drafted = np.full(len(above), -1, dtype=np.int32)
        if len(trees):
            above[nodes] += np.concatenate([tree.parents for tree in trees]) + 1
            drafted[nodes] = np.concatenate([tree.tokens for tree in trees])
        depths, at = nodes.astype(np.int64), above
        # Each pass doubles how far up a place has counted.
        while bool(nodes[at].any()):
            depths, at = depths + depths[at], at[at]
        return cls(roots, above, drafted, depths)

    def select(self, proposals: Sequence[int]) -> NodeIndex:
        """Of some of the proposals, ascending."""
        if len(proposals) == len(self.roots):
            return self
        ends = np.append(self.roots[1:], len(self.parent_indices))
        owned = [np.arange(self.roots[index], ends[index]) for index in proposals]
        sizes = np.array([len(mine) for mine in owned])
        kept, roots = np.concatenate(owned), sizes.cumsum() - sizes
        above = self.parent_indices[kept] + (roots - self.roots[proposals]).repeat(sizes)
        return NodeIndex(roots, above, self.node_tokens[kept], self.depths[kept])

    def prefix_digests(self, prefixes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """[P]: the prefix digest at each place; `prefixes` [L]: at the roots."""
        result = np.empty(len(self.parent_indices), dtype=np.uint64)
        result[self.roots] = prefixes
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            at = np.flatnonzero(self.depths == depth)
            result[at] = extend_digests(result[self.parent_indices[at]], self.node_tokens[at])
        return result


class CandidateLayout(NamedTuple):
    """How the nodes of some proposals lie among the candidates; for the first four see
    `ConnectionSlots`."""

    roots: Indices
    parent_indices: Indices
    node_tokens: NDArray[np.int32]
    depths: Indices
    tokens: NDArray[np.int32]
    """[P, c]: candidates of each place, best first."""
    ranks: Indices
    """[P]: which of its parent's candidates a node is; c where it is none, and at roots."""
    is_child: NDArray[np.bool_]
    """[P, c]: candidates that are nodes of the proposal."""

    @classmethod
    def of_candidates(cls, places: NodeIndex, tokens: NDArray[np.int32]) -> CandidateLayout:
        """The layout of proposals with these candidates [P, c]."""
        same = tokens[places.parent_indices] == places.node_tokens[:, None]
        same[places.roots] = False
        found = same.any(axis=1)
        ranks = np.where(found, same.argmax(axis=1), tokens.shape[1])
        is_child = np.zeros(tokens.shape, dtype=np.bool_)
        is_child[places.parent_indices[found], ranks[found]] = True
        return cls(*places, tokens, ranks, is_child)

    def reach_probability(self, stands: Floats) -> Floats:
        """[P]: probability that a verdict's path comes to each place; `stands` [P]: that a node
        stands once its parent was reached; what it says of roots does not matter."""
        result, at = stands.copy(), self.parent_indices
        result[self.roots] = 1.0
        while bool(self.depths[at].any()):
            result, at = result * result[at], at[at]
        found: Floats = result * result[at]
        return found


class ChosenOutcomes(NamedTuple):
    """Outcomes of one proposal, best first; [K] each."""

    places: Indices
    tokens: NDArray[np.int32]
    gains: Floats
    """Expected: the probability of each outcome, as far as it is known."""


def best_outcomes(
    layout: CandidateLayout, gains: Floats, proposal: int, *, room: int, count: int
) -> ChosenOutcomes:
    """Choose up to `count` outcomes of a proposal by expected gain [P, c]. Impossible outcomes are
    left out: tokens that are already children of the node, and nodes too deep for another draft
    level. `room`: levels that the proposal may have. Ties go to the lower place, then to the lower
    candidate."""
    first = int(layout.roots[proposal])
    last = proposal + 1 == len(layout.roots)
    mine = slice(first, len(gains) if last else int(layout.roots[proposal + 1]))
    possible = np.where(layout.is_child[mine], 0.0, gains[mine])
    possible[layout.depths[mine] > room - 2] = 0.0
    flat = possible.ravel()
    if 0 < count < len(flat):
        # Not argpartition: which of equal ones it takes is not defined.
        least = np.partition(flat, -count)[-count]
        found = np.flatnonzero((flat >= least) & (flat > 0.0))
    else:
        found = np.flatnonzero(flat > 0.0)
    order = found[np.argsort(-flat[found], kind="stable")][: max(count, 0)]
    places, columns = np.divmod(order, gains.shape[1])
    places += first
    return ChosenOutcomes(places, layout.tokens[places, columns], flat[order])


def num_worthwhile(gains: Floats) -> int:
    """Return how many of these outcomes [K], sorted best first over all sessions, are worth
    drafting: the largest launch size whose expected gain justifies its rows."""
    count = 0
    for size in OUTCOME_BATCH_SIZES:
        added = gains[count:size]
        if float(added.sum()) < _WORTH * len(added):
            break
        count = size
    return min(count, len(gains))


class VerdictPath(NamedTuple):
    """What a verdict showed of a proposal: the places that its path reached, and what followed."""

    places: Indices
    """[m], the root first."""
    columns: Indices
    """[m]: which candidate of the place was emitted; -1: none of them."""
    accepted: NDArray[np.bool_]
    """[m]: whether that is a child, on whose side the path went on."""


def follow_verdict(layout: CandidateLayout, proposal: int, emitted: Sequence[int]) -> VerdictPath:
    """Follow the emitted tokens through a proposal, as far as they lead."""
    places: list[int] = []
    columns: list[int] = []
    stood: list[bool] = []
    place = int(layout.roots[proposal])
    for token in emitted:
        candidates = layout.tokens[place].tolist()
        places.append(place)
        columns.append(candidates.index(token) if token in candidates else -1)
        child = np.flatnonzero((layout.parent_indices == place) & (layout.node_tokens == token))
        stood.append(len(child) > 0)
        if not len(child):
            break
        place = int(child[0])
    return VerdictPath(
        np.array(places, dtype=np.int64),
        np.array(columns, dtype=np.int64),
        np.array(stood, dtype=np.bool_),
    )
