"""Outcomes (accepted path, next token) of proposals, ranked by expected gain.

A proposal of n nodes has 1 + n places: the root, then the nodes. A verdict accepts the path from
the root to one place and appends a token that no child of this place has. Letters in shapes:
L proposals; P places of all proposals, one proposal after another; c candidate tokens at each
place; K outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.spec.digest import extend_digests
from outrider.spec.tree import DraftTree

OUTCOME_BATCH_SIZES: Final = (4, 16, 32, 64)
"""Numbers of outcomes for which one launch can draft. A launch for fewer outcomes is padded to the
next size."""
_WORTH: Final = 0.004
"""Minimum mean gain (probability of a hit) of the outcomes that a larger launch adds. A hit saves
about 2 ms of GPU time; each row of a larger launch costs 10 to 30 us, partly hidden behind the
verify round."""

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


class NodeIndex(NamedTuple):
    """Places (roots and nodes) of several proposals in flat arrays."""

    roots: Indices
    """[L]: index of each proposal's root among the P places."""
    parent_indices: Indices
    """[P]: index of the parent of each place; a root is its own parent."""
    node_tokens: NDArray[np.int32]
    """[P]: token of each node; -1 at roots."""
    depths: Indices
    """[P]: number of tokens from the root to each place, 0 at roots."""

    @classmethod
    def of_trees(cls, trees: Sequence[DraftTree]) -> NodeIndex:
        """Build the arrays for proposals with these trees."""
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
        # Each pass doubles the number of levels that a place has counted.
        while bool(nodes[at].any()):
            depths, at = depths + depths[at], at[at]
        return cls(roots, above, drafted, depths)

    def select(self, proposals: Sequence[int]) -> NodeIndex:
        """Return the places of some of the proposals, whose indices must be ascending."""
        if len(proposals) == len(self.roots):
            return self
        ends = np.append(self.roots[1:], len(self.parent_indices))
        owned = [np.arange(self.roots[index], ends[index]) for index in proposals]
        sizes = np.array([len(mine) for mine in owned])
        kept, roots = np.concatenate(owned), sizes.cumsum() - sizes
        above = self.parent_indices[kept] + (roots - self.roots[proposals]).repeat(sizes)
        return NodeIndex(roots, above, self.node_tokens[kept], self.depths[kept])

    def prefix_digests(self, prefixes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the digest of the prefix that ends at each place, uint64 [P]. `prefixes` [L]:
        digest of the prefix that ends at each root."""
        result = np.empty(len(self.parent_indices), dtype=np.uint64)
        result[self.roots] = prefixes
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            at = np.flatnonzero(self.depths == depth)
            result[at] = extend_digests(result[self.parent_indices[at]], self.node_tokens[at])
        return result


class CandidateLayout(NamedTuple):
    """Places of several proposals together with the candidate tokens at each place. The first four
    fields are those of `NodeIndex`."""

    roots: Indices
    parent_indices: Indices
    node_tokens: NDArray[np.int32]
    depths: Indices
    tokens: NDArray[np.int32]
    """[P, c]: candidate tokens of each place, best first."""
    ranks: Indices
    """[P]: index of each node among the candidates of its parent; c at roots and for nodes that are
    not among the candidates."""
    is_child: NDArray[np.bool_]
    """[P, c]: whether a candidate is a node of the proposal."""

    @classmethod
    def of_candidates(cls, places: NodeIndex, tokens: NDArray[np.int32]) -> CandidateLayout:
        """Return the layout of proposals with these candidate tokens [P, c]."""
        same = tokens[places.parent_indices] == places.node_tokens[:, None]
        same[places.roots] = False
        found = same.any(axis=1)
        ranks = np.where(found, same.argmax(axis=1), tokens.shape[1])
        is_child = np.zeros(tokens.shape, dtype=np.bool_)
        is_child[places.parent_indices[found], ranks[found]] = True
        return cls(*places, tokens, ranks, is_child)

    def reach_probability(self, stands: Floats) -> Floats:
        """Return for each of the P places (roots and nodes) the probability that the accepted path
        of its proposal contains it, float64 [P]; 1 for roots. `stands` [P]: probability that a node
        is accepted if its parent is; the entries of roots are ignored."""
        result, at = stands.copy(), self.parent_indices
        result[self.roots] = 1.0
        while bool(self.depths[at].any()):
            result, at = result * result[at], at[at]
        found: Floats = result * result[at]
        return found


class ChosenOutcomes(NamedTuple):
    """Outcomes of one proposal, best first; arrays [K]. Each outcome is a place, the last of the
    accepted path, and the next token."""

    places: Indices
    tokens: NDArray[np.int32]
    gains: Floats
    """Expected gain of each outcome, that is its estimated probability."""


def best_outcomes(
    layout: CandidateLayout, gains: Floats, proposal: int, *, room: int, count: int
) -> ChosenOutcomes:
    """Return up to `count` outcomes of one proposal, those with the highest expected gains. `gains`
    [P, c]: gain of each candidate at each place.

    An outcome is left out if its token is a child of its place, because the accepted path would
    then continue, or if its place is too deep for another draft level. `room`: maximum number of
    levels below the root. Among equal gains the lower place comes first, then the lower candidate.
    """
    first = int(layout.roots[proposal])
    last = proposal + 1 == len(layout.roots)
    mine = slice(first, len(gains) if last else int(layout.roots[proposal + 1]))
    possible = np.where(layout.is_child[mine], 0.0, gains[mine])
    possible[layout.depths[mine] > room - 2] = 0.0
    flat = possible.ravel()
    if 0 < count < len(flat):
        # Not argpartition, because its choice among equal values is not defined.
        least = np.partition(flat, -count)[-count]
        found = np.flatnonzero((flat >= least) & (flat > 0.0))
    else:
        found = np.flatnonzero(flat > 0.0)
    order = found[np.argsort(-flat[found], kind="stable")][: max(count, 0)]
    places, columns = np.divmod(order, gains.shape[1])
    places += first
    return ChosenOutcomes(places, layout.tokens[places, columns], flat[order])


def num_worthwhile(gains: Floats) -> int:
    """Return how many of the outcomes are worth drafting for: the largest launch size whose
    expected gain justifies its rows. `gains` [K]: gains of the outcomes of all sessions, best
    first."""
    count = 0
    for size in OUTCOME_BATCH_SIZES:
        added = gains[count:size]
        if float(added.sum()) < _WORTH * len(added):
            break
        count = size
    return min(count, len(gains))


class VerdictPath(NamedTuple):
    """Path of a verdict through a proposal. Token i of the verdict was emitted at place i of the
    path."""

    places: Indices
    """[m]: places that the path reached, the root first."""
    columns: Indices
    """[m]: index of the emitted token among the candidates of each place; -1 if it is not a
    candidate."""
    accepted: NDArray[np.bool_]
    """[m]: whether the emitted token is a child of the place, so that the path continues there."""


def follow_verdict(layout: CandidateLayout, proposal: int, emitted: Sequence[int]) -> VerdictPath:
    """Return the path of the emitted tokens through a proposal, up to the first token that is no
    node of the proposal."""
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
