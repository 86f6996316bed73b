"""What the device drafts of a session, and which sessions it leaves to the host (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.device.shapes import bucket
from outrider.spec.plan import Plan, default_depth
from outrider.spec.sampling import Rule, SamplingParams
from outrider_drafter.sessions import Session


class Shape(NamedTuple):
    """What is grown; with the bucket it is the key of a graph."""

    num_nodes: int
    top_k: int
    """1: a chain."""
    depth: int
    with_law: bool = False
    """Whether the laws that the tokens are drawn from come along."""

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
TREES: Final = {8: 4, 16: 4, 32: 8, 64: 8}
"""Nodes of a tree, and children of a node: a plan gets the most nodes that are not more than its
own, or the fewest."""
BATCH_SIZES: Final = (1, 4, 8, 16, 32, 64)
"""Sessions of one launch."""
MOST_NODES: Final = 1024
"""Nodes of all trees of one launch."""


def family() -> Iterator[tuple[Shape, bool]]:
    """What a drafter on a device captures at its start, and no plan can widen: shapes, each with
    whether its sessions may warp their logits or share the target's noise in trees."""
    for length in CHAIN_LENGTHS:
        for with_law, general in ((False, False), (False, True), (True, True)):
            yield Shape(length, 1, length, with_law), general
    for nodes, top_k in TREES.items():
        for general in (False, True):
            yield Shape(nodes, top_k, default_depth(nodes)), general


def most_sessions(shape: Shape) -> int:
    """Sessions that one launch may draft for."""
    if shape.top_k == 1:
        return BATCH_SIZES[-1]
    return max(size for size in BATCH_SIZES if size == 1 or size * shape.num_nodes <= MOST_NODES)


def fitted(shape: Shape) -> Shape:
    """The shape of the family that is drafted in the place of this one."""
    if shape.top_k == 1:
        length = min(bucket(shape.depth, CHAIN_LENGTHS), CHAIN_LENGTHS[-1])
        return Shape(length, 1, length, shape.with_law)
    nodes = max([size for size in TREES if size <= shape.num_nodes], default=min(TREES))
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
