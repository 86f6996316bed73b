"""Draft shapes and batch sizes captured as GPU graphs, and the sessions that they support. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.graphs.shapes import bucket_for
from outrider.spec.plan import SpeculationPlan, default_depth, tree_depth
from outrider.spec.sampling import Rule, SamplingParams
from outrider_drafter.state.outcomes import OUTCOME_BATCH_SIZES
from outrider_drafter.state.session import FollowedSession


class DraftTreeShape(NamedTuple):
    """Shape of a draft; with the bucket it is the key of a graph."""

    num_nodes: int
    top_k: int
    """1: a chain."""
    depth: int
    has_distribution: bool = False
    """Whether the distributions that the tokens are drawn from come along."""
    has_alternatives: bool = False
    """Whether what else might have been drafted comes along: of chains that are no draws, where any
    session is in a grammar. Not of branches: what does not hurry must not take long."""

    @property
    def draft_rows(self) -> int:
        """Draft rows that the steps write."""
        return min(self.top_k, self.num_nodes) * (self.depth - 1)

    def rows_needed(self, depths: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Draft rows that a session needs room for; a chain is cut to `depths` [B], and what it
        writes past the table is not kept."""
        return depths - 1 if self.top_k == 1 else self.draft_rows


CHAIN_LENGTHS: Final = (3, 4, 5, 7)
"""A chain is drafted in the next of these lengths and cut; longer ones get the longest."""
MODEL_CHAIN_LENGTHS: Final = (1, 2, *CHAIN_LENGTHS)
"""The same where each step is a forward of a model, too long to be cut off again."""
TREES: Final = {7: 4, 16: 4, 32: 8, 64: 8}
"""Nodes of a tree, and children of a node: a plan gets the most nodes that are not more than its
own, and a chain of as many where these are fewer. With its root a tree fills the rows that a
verifier runs it in (`TREE_BUCKETS`): one of 8 would take as long as one of 16."""
BATCH_SIZES: Final = (1, 4, 8, 16, 32, 64)
"""Sessions of one launch: a launch takes the next size up."""
COARSE_BATCH_SIZES: Final = (1, 8, 64)
"""The same for sessions in grammars, and for graphs that take long to capture."""
MAX_LAUNCH_NODES: Final = 1024
"""Nodes of all trees of one launch."""


PATH_ROW_BUCKETS: Final = (4, 8, 16)
"""New rows of a branch."""
SCORE_SIZES: Final = {False: (1, 4, 8, 16, 32), True: (1, 4, 8)}
"""Live proposals of one launch: chains, and trees."""


class Buckets(NamedTuple):
    """Sizes for which CUDA graphs are captured.

    A head has many short launches, so its sizes have fine steps. Launches of a draft model are many
    times as long and mostly read weights, so coarse steps suffice.
    """

    rows: tuple[int, ...] = (4, 8, 16)
    """Rows of a catch-up that is part of a draft; longer ones are written ahead."""
    score_rows: tuple[int, ...] = (8, 16)
    """Rows of one that is part of scoring; the last is the last of `rows`."""
    sessions: tuple[int, ...] = BATCH_SIZES
    chains: tuple[int, ...] = CHAIN_LENGTHS
    path_rows: tuple[int, ...] = PATH_ROW_BUCKETS


MODEL_BUCKETS: Final = Buckets(
    rows=(8,),
    score_rows=(8,),
    sessions=COARSE_BATCH_SIZES,
    chains=MODEL_CHAIN_LENGTHS,
    path_rows=PATH_ROW_BUCKETS[1:],
)
EXCHANGE_BUCKETS: Final = Buckets(rows=(8,), score_rows=(8,), sessions=COARSE_BATCH_SIZES)
"""Those of a head that drafts by messages only what cannot be drafted between devices: a drafter
captures them before it joins, also after it was killed."""


class ProposalShape(NamedTuple):
    """What of a live proposal is scored; with the bucket it is the key of a graph."""

    num_nodes: int
    """N, draft nodes without the root."""
    is_chain: bool

    @property
    def num_positions(self) -> int:
        """P: nodes that there is place for, and the root."""
        return 1 + self.num_nodes

    @property
    def depth(self) -> int:
        """Levels of the deepest that is drafted here."""
        return self.num_nodes if self.is_chain else default_depth(self.num_nodes)

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Buckets of proposals."""
        return SCORE_SIZES[not self.is_chain]

    def rows_needed(self, depths: NDArray[np.int64]) -> int:
        """Draft rows that a session needs room for, whatever its depth."""
        return self.num_nodes


def proposal_shape(num_nodes: int, *, chain: bool) -> ProposalShape:
    """What is scored of a proposal of so many nodes: all of them where that is possible."""
    counts = CHAIN_LENGTHS if chain else tuple(TREES)
    return ProposalShape(min(bucket_for(num_nodes, counts), counts[-1]), chain)


def max_path_rows(shape: DraftTreeShape, buckets: tuple[int, ...] = PATH_ROW_BUCKETS) -> int:
    """R: new rows of a branch, whose path ends at most at the last level of the same shape."""
    return bucket_for(shape.depth + 1, buckets)


def max_outcomes(shape: DraftTreeShape) -> int:
    """Branches that one launch may draft for."""
    if shape.top_k == 1:
        return OUTCOME_BATCH_SIZES[-1]
    return max(
        size
        for size in OUTCOME_BATCH_SIZES
        if size == 4 or size * shape.num_nodes <= MAX_LAUNCH_NODES
    )


def scoring_shapes() -> Iterator[tuple[ProposalShape, bool]]:
    """What is captured for scoring: nodes, each with whether any session processes its logits."""
    forms = [proposal_shape(length, chain=True) for length in CHAIN_LENGTHS]
    forms += [proposal_shape(count, chain=False) for count in TREES]
    for nodes in forms:
        yield nodes, False
        yield nodes, True


def draft_shapes(
    chains: tuple[int, ...], *, branches: bool = False
) -> Iterator[tuple[DraftTreeShape, bool]]:
    """What a drafter on a device captures at its start, and no plan can widen: shapes, each with
    whether its sessions may warp their logits or share the target's noise in trees."""
    for length in chains:
        for has_distribution, general in ((False, False), (False, True), (True, True)):
            yield DraftTreeShape(length, 1, length, has_distribution), general
        if not branches:
            yield grammar_shape(DraftTreeShape(length, 1, length)), True
    for nodes, top_k in TREES.items():
        for general in (False, True):
            yield DraftTreeShape(nodes, top_k, default_depth(nodes)), general


def grammar_shape(shape: DraftTreeShape) -> DraftTreeShape:
    """What is grown where any session of a launch is in a grammar."""
    return shape._replace(has_alternatives=shape.top_k == 1 and not shape.has_distribution)


def batch_sizes(shape: DraftTreeShape, sessions: tuple[int, ...] = BATCH_SIZES) -> list[int]:
    """Those of the buckets of sessions that a shape is drafted in."""
    sizes = COARSE_BATCH_SIZES if shape.has_alternatives else sessions
    return [size for size in sizes if size <= max_sessions(shape)]


def outcome_batch_sizes(shape: DraftTreeShape) -> list[int]:
    """Buckets of branches."""
    return [size for size in OUTCOME_BATCH_SIZES if size <= max_outcomes(shape)]


def max_sessions(shape: DraftTreeShape) -> int:
    """Sessions that one launch may draft for."""
    if shape.top_k == 1:
        return BATCH_SIZES[-1]
    return max(
        size for size in BATCH_SIZES if size == 1 or size * shape.num_nodes <= MAX_LAUNCH_NODES
    )


def fit_shape(shape: DraftTreeShape, chains: tuple[int, ...]) -> DraftTreeShape:
    """The shape of the family that is drafted in the place of this one."""
    nodes = max([size for size in TREES if size <= shape.num_nodes], default=0)
    if shape.top_k == 1 or not nodes:
        levels = shape.depth if shape.top_k == 1 else shape.num_nodes
        length = min(bucket_for(levels, chains), chains[-1])
        return DraftTreeShape(length, 1, length, shape.has_distribution)
    return DraftTreeShape(nodes, TREES[nodes], default_depth(nodes))


def is_supported(sampling: SamplingParams, plan: SpeculationPlan) -> bool:
    """Whether the device drafts as the host would."""
    return plan.top_k == 1 or sampling.effective_rule is not Rule.REJECTION


def shape_of_session(session: FollowedSession) -> DraftTreeShape | None:
    """What to grow for a session; None if nothing can be drafted."""
    plan, room = session.plan, session.draft_levels_left
    num_nodes, has_distribution = plan.draft_tokens, session.ships_distributions
    if num_nodes <= 0 or room <= 0:
        return None
    if plan.top_k == 1:
        # Near its end a session takes the beginning of a chain, so that all share one graph.
        return DraftTreeShape(num_nodes, 1, num_nodes, has_distribution)
    depth = min(tree_depth(num_nodes, plan.depth), room)
    if has_distribution:
        # Its plan was a chain's when it began: trees of this rule are grown on the host.
        return DraftTreeShape(depth, 1, depth, has_distribution)
    return DraftTreeShape(num_nodes, plan.top_k, depth)
