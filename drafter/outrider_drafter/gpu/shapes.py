"""What the device drafts of a session, and which sessions it leaves to the host (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.graphs.shapes import bucket
from outrider.spec.plan import Plan, default_depth
from outrider.spec.sampling import Rule, SamplingParams
from outrider_drafter.state.outcomes import BRANCH_SIZES
from outrider_drafter.state.session import Session


class Shape(NamedTuple):
    """What is grown; with the bucket it is the key of a graph."""

    num_nodes: int
    top_k: int
    """1: a chain."""
    depth: int
    with_law: bool = False
    """Whether the laws that the tokens are drawn from come along."""
    with_others: bool = False
    """Whether what else might have been drafted comes along: of chains that are no draws, where any
    session is in a grammar. Not of branches: what does not hurry must not take long."""

    @property
    def draft_rows(self) -> int:
        """Draft rows that the steps write."""
        return min(self.top_k, self.num_nodes) * (self.depth - 1)

    def kept_rows(self, depths: NDArray[np.int64]) -> NDArray[np.int64] | int:
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
"""Sessions of one launch, of which a few sizes are"""
FEW_SIZES: Final = (1, 8, 64)
"""for sessions in grammars, and for what takes long to capture."""
MOST_NODES: Final = 1024
"""Nodes of all trees of one launch."""


PATH_ROW_BUCKETS: Final = (4, 8, 16)
"""New rows of a branch."""
SCORE_SIZES: Final = {False: (1, 4, 8, 16, 32), True: (1, 4, 8)}
"""Live proposals of one launch: chains, and trees."""


class Buckets(NamedTuple):
    """What is captured of each form: a head's launches are short and many, a model's are many
    times as long, and rows change little of the time that its weights take to read."""

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
    sessions=FEW_SIZES,
    chains=MODEL_CHAIN_LENGTHS,
    path_rows=PATH_ROW_BUCKETS[1:],
)


class Nodes(NamedTuple):
    """What of a live proposal is scored; with the bucket it is the key of a graph."""

    num_nodes: int
    """N"""
    chain: bool

    @property
    def places(self) -> int:
        """P: nodes that there is place for, and the root."""
        return 1 + self.num_nodes

    @property
    def depth(self) -> int:
        """Levels of the deepest that is drafted here."""
        return self.num_nodes if self.chain else default_depth(self.num_nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Buckets of proposals."""
        return SCORE_SIZES[not self.chain]

    def kept_rows(self, depths: NDArray[np.int64]) -> int:
        """Draft rows that a session needs room for, whatever its depth."""
        return self.num_nodes


def nodes_of(num_nodes: int, *, chain: bool) -> Nodes:
    """What is scored of a proposal of so many nodes: all of them where that is possible."""
    counts = CHAIN_LENGTHS if chain else tuple(TREES)
    return Nodes(min(bucket(num_nodes, counts), counts[-1]), chain)


def path_rows(shape: Shape, buckets: tuple[int, ...] = PATH_ROW_BUCKETS) -> int:
    """R: new rows of a branch, whose path ends at most at the last level of the same shape."""
    return bucket(shape.depth + 1, buckets)


def most_branches(shape: Shape) -> int:
    """Branches that one launch may draft for."""
    if shape.top_k == 1:
        return BRANCH_SIZES[-1]
    return max(size for size in BRANCH_SIZES if size == 4 or size * shape.num_nodes <= MOST_NODES)


def score_family() -> Iterator[tuple[Nodes, bool]]:
    """What is captured for scoring: nodes, each with whether any session warps its logits."""
    forms = [nodes_of(length, chain=True) for length in CHAIN_LENGTHS]
    forms += [nodes_of(count, chain=False) for count in TREES]
    for nodes in forms:
        yield nodes, False
        yield nodes, True


def family(chains: tuple[int, ...], *, branches: bool = False) -> Iterator[tuple[Shape, bool]]:
    """What a drafter on a device captures at its start, and no plan can widen: shapes, each with
    whether its sessions may warp their logits or share the target's noise in trees."""
    for length in chains:
        for with_law, general in ((False, False), (False, True), (True, True)):
            yield Shape(length, 1, length, with_law), general
        if not branches:
            yield in_grammars(Shape(length, 1, length)), True
    for nodes, top_k in TREES.items():
        for general in (False, True):
            yield Shape(nodes, top_k, default_depth(nodes)), general


def in_grammars(shape: Shape) -> Shape:
    """What is grown where any session of a launch is in a grammar."""
    return shape._replace(with_others=shape.top_k == 1 and not shape.with_law)


def batch_sizes(shape: Shape, sessions: tuple[int, ...] = BATCH_SIZES) -> list[int]:
    """Those of the buckets of sessions that a shape is drafted in."""
    sizes = FEW_SIZES if shape.with_others else sessions
    return [size for size in sizes if size <= most_sessions(shape)]


def branch_sizes(shape: Shape) -> list[int]:
    """Buckets of branches."""
    return [size for size in BRANCH_SIZES if size <= most_branches(shape)]


def most_sessions(shape: Shape) -> int:
    """Sessions that one launch may draft for."""
    if shape.top_k == 1:
        return BATCH_SIZES[-1]
    return max(size for size in BATCH_SIZES if size == 1 or size * shape.num_nodes <= MOST_NODES)


def fitted(shape: Shape, chains: tuple[int, ...]) -> Shape:
    """The shape of the family that is drafted in the place of this one."""
    nodes = max([size for size in TREES if size <= shape.num_nodes], default=0)
    if shape.top_k == 1 or not nodes:
        levels = shape.depth if shape.top_k == 1 else shape.num_nodes
        length = min(bucket(levels, chains), chains[-1])
        return Shape(length, 1, length, shape.with_law)
    return Shape(nodes, TREES[nodes], default_depth(nodes))


def covers(sampling: SamplingParams, plan: Plan) -> bool:
    """Whether the device drafts as the host would."""
    return plan.top_k == 1 or sampling.effective_rule is not Rule.REJECTION


def shape_of(session: Session) -> Shape | None:
    """What to grow for a session; None if nothing can be drafted."""
    plan, room = session.plan, session.room
    num_nodes, rule = plan.draft_tokens, session.sampling.effective_rule
    with_law = rule is Rule.REJECTION
    if num_nodes <= 0 or room <= 0:
        return None
    if plan.top_k == 1:
        # Near its end a session takes the beginning of a chain, so that all share one graph.
        return Shape(num_nodes, 1, num_nodes, with_law)
    depth = min(plan.depth or default_depth(num_nodes), num_nodes, room)
    if with_law:
        # Its plan was a chain's when it began: trees of this rule are grown on the host.
        return Shape(depth, 1, depth, with_law)
    return Shape(num_nodes, plan.top_k, depth)
