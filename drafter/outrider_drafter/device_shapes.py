"""What the device drafts of a session, and which sessions it leaves to the host (pure)."""

from __future__ import annotations

from typing import NamedTuple

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
