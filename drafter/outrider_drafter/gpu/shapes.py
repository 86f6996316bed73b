"""Draft shapes and batch sizes captured as GPU graphs, and the sessions that they support.

A bucket is a batch size for which graphs are captured. A branch is a draft for one outcome of a
pending proposal.
"""

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
    """Shape of a draft. It is part of the key of a captured CUDA graph."""

    num_nodes: int
    top_k: int
    """Number of children of an expanded node; 1 for a chain."""
    depth: int
    has_distribution: bool = False
    """Whether the draft distributions that the tokens are drawn from are part of the output."""
    has_alternatives: bool = False
    """Whether alternative tokens of each level are part of the output. They are requested for
    chains without distributions if a session of the launch has a grammar, but not in look-ahead,
    where drafts must be fast."""

    @property
    def draft_rows(self) -> int:
        """Number of draft rows that all levels together write."""
        return min(self.top_k, self.num_nodes) * (self.depth - 1)

    def rows_needed(self, depths: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Return the number of draft KV rows to reserve for each session. A chain needs `depths` -
        1 rows, where `depths` [B] is the number of levels to which each session's chain is cut; KV
        of its later levels may be discarded. A tree always needs `draft_rows`."""
        return depths - 1 if self.top_k == 1 else self.draft_rows


CHAIN_LENGTHS: Final = (3, 4, 5, 7)
"""Captured chain lengths. A chain is drafted with the next larger captured length and then cut.
Chains longer than the largest captured length are shortened to it."""
MODEL_CHAIN_LENGTHS: Final = (1, 2, *CHAIN_LENGTHS)
"""Captured chain lengths of small models. They have finer steps, because each level that is cut off
costs a forward pass of the model."""
TREES: Final = {7: 4, 16: 4, 32: 8, 64: 8}
"""Captured trees, as {number of nodes: number of children of an expanded node}. A plan gets the
largest of these trees that has at most its number of nodes, or a chain if no tree is that small.
Each tree and its root together fill a bucket of the verifier (`TREE_BUCKETS`). A tree of 8 nodes
would not fit the bucket of 8 and would take as long as one of 16."""
BATCH_SIZES: Final = (1, 4, 8, 16, 32, 64)
"""Numbers of sessions for which draft launches are captured. A launch is padded to the next larger
number."""
COARSE_BATCH_SIZES: Final = (1, 8, 64)
"""Numbers of sessions for which draft launches are captured if sessions have grammars or if the
graphs take long to capture."""
MAX_LAUNCH_NODES: Final = 1024
"""Maximum number of nodes of all trees of one launch."""


PATH_ROW_BUCKETS: Final = (4, 8, 16)
"""Numbers of new KV rows for which outcome drafts are captured. The new rows belong to the path to
the outcome."""
SCORE_SIZES: Final = {False: (1, 4, 8, 16, 32), True: (1, 4, 8)}
"""Numbers of proposals for which scoring launches are captured. The key is whether the proposals
are trees."""


class Buckets(NamedTuple):
    """Sizes for which CUDA graphs are captured.

    A head has many short launches, so its sizes have fine steps. Launches of a draft model are many
    times as long and mostly read weights, so coarse steps suffice.
    """

    rows: tuple[int, ...] = (4, 8, 16)
    """Numbers of new KV rows of a session that a draft launch can compute. If a session has more
    new rows, most of them are written before the launch."""
    score_rows: tuple[int, ...] = (8, 16)
    """Numbers of new KV rows of a session that a scoring launch can compute. The largest number is
    that of `rows`."""
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
"""Sizes for a head whose verifiers exchange data directly between GPUs, so that only few sessions
are drafted by messages. With few graphs to capture, a restarted drafter is ready soon."""


class ProposalShape(NamedTuple):
    """Shape in which a pending proposal is scored. It is part of the key of a captured CUDA
    graph."""

    num_nodes: int
    """N, maximum number of scored nodes without the root."""
    is_chain: bool

    @property
    def num_positions(self) -> int:
        """P, number of places: the nodes and the root."""
        return 1 + self.num_nodes

    @property
    def depth(self) -> int:
        """Maximum number of levels of a proposal with this shape."""
        return self.num_nodes if self.is_chain else default_depth(self.num_nodes)

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Numbers of proposals for which launches of this shape are captured."""
        return SCORE_SIZES[not self.is_chain]

    def rows_needed(self, depths: NDArray[np.int64]) -> int:
        """Return the number of draft KV rows to reserve for each session. All nodes of the shape
        are run, so `depths` has no influence."""
        return self.num_nodes


def proposal_shape(num_nodes: int, *, chain: bool) -> ProposalShape:
    """Return the shape in which a proposal of `num_nodes` nodes is scored. If the proposal is too
    large for all captured shapes, only some of its nodes are scored."""
    counts = CHAIN_LENGTHS if chain else tuple(TREES)
    return ProposalShape(min(bucket_for(num_nodes, counts), counts[-1]), chain)


def max_path_rows(shape: DraftTreeShape, buckets: tuple[int, ...] = PATH_ROW_BUCKETS) -> int:
    """Return the number of new KV rows with which outcome drafts of this shape are captured: enough
    for a path of `shape.depth` nodes and the outcome's token. `buckets`: captured numbers of new
    rows."""
    return bucket_for(shape.depth + 1, buckets)


def max_outcomes(shape: DraftTreeShape) -> int:
    """Return the maximum number of outcomes for which one launch of this shape drafts."""
    if shape.top_k == 1:
        return OUTCOME_BATCH_SIZES[-1]
    return max(
        size
        for size in OUTCOME_BATCH_SIZES
        if size == 4 or size * shape.num_nodes <= MAX_LAUNCH_NODES
    )


def scoring_shapes() -> Iterator[tuple[ProposalShape, bool]]:
    """Yield a (shape, processes_logits) pair for each scoring graph that is captured at start-up:
    the shape of its proposals, and whether it supports logits processing."""
    forms = [proposal_shape(length, chain=True) for length in CHAIN_LENGTHS]
    forms += [proposal_shape(count, chain=False) for count in TREES]
    for nodes in forms:
        yield nodes, False
        yield nodes, True


def draft_shapes(
    chains: tuple[int, ...], *, branches: bool = False
) -> Iterator[tuple[DraftTreeShape, bool]]:
    """Yield a (shape, is_general) pair for each draft graph that is captured at start-up. A general
    graph supports logits processing and trees drawn with the target's random numbers. `chains`:
    chain lengths; `branches`: whether the graphs draft for outcomes instead of current prefixes."""
    for length in chains:
        for has_distribution, general in ((False, False), (False, True), (True, True)):
            yield DraftTreeShape(length, 1, length, has_distribution), general
        if not branches:
            yield grammar_shape(DraftTreeShape(length, 1, length)), True
    for nodes, top_k in TREES.items():
        for general in (False, True):
            yield DraftTreeShape(nodes, top_k, default_depth(nodes)), general


def grammar_shape(shape: DraftTreeShape) -> DraftTreeShape:
    """Return the shape to draft instead of `shape` if a session of the launch has a grammar. It
    differs only for chains without distributions, to which it adds alternative tokens."""
    return shape._replace(has_alternatives=shape.top_k == 1 and not shape.has_distribution)


def batch_sizes(shape: DraftTreeShape, sessions: tuple[int, ...] = BATCH_SIZES) -> list[int]:
    """Return the numbers of sessions for which launches of this shape are captured. `sessions`:
    numbers to choose from."""
    sizes = COARSE_BATCH_SIZES if shape.has_alternatives else sessions
    return [size for size in sizes if size <= max_sessions(shape)]


def outcome_batch_sizes(shape: DraftTreeShape) -> list[int]:
    """Return the numbers of outcomes for which launches of this shape are captured."""
    return [size for size in OUTCOME_BATCH_SIZES if size <= max_outcomes(shape)]


def max_sessions(shape: DraftTreeShape) -> int:
    """Return the maximum number of sessions in one launch of this shape."""
    if shape.top_k == 1:
        return BATCH_SIZES[-1]
    return max(
        size for size in BATCH_SIZES if size == 1 or size * shape.num_nodes <= MAX_LAUNCH_NODES
    )


def fit_shape(shape: DraftTreeShape, chains: tuple[int, ...]) -> DraftTreeShape:
    """Return the captured shape that replaces `shape`: a chain for a chain, otherwise the largest
    captured tree that has no more nodes, or a chain if there is none. `chains`: captured chain
    lengths."""
    nodes = max([size for size in TREES if size <= shape.num_nodes], default=0)
    if shape.top_k == 1 or not nodes:
        levels = shape.depth if shape.top_k == 1 else shape.num_nodes
        length = min(bucket_for(levels, chains), chains[-1])
        return DraftTreeShape(length, 1, length, shape.has_distribution)
    return DraftTreeShape(nodes, TREES[nodes], default_depth(nodes))


def is_supported(sampling: SamplingParams, plan: SpeculationPlan) -> bool:
    """Return whether the GPU graphs can draft for these parameters. They cannot draft trees under
    the rejection rule."""
    return plan.top_k == 1 or sampling.effective_rule is not Rule.REJECTION


def shape_of_session(session: FollowedSession) -> DraftTreeShape | None:
    """Return the draft shape for a session, or None if nothing can be drafted."""
    plan, room = session.plan, session.draft_levels_left
    num_nodes, has_distribution = plan.draft_tokens, session.ships_distributions
    if num_nodes <= 0 or room <= 0:
        return None
    if plan.top_k == 1:
        # A session near its maximum length cuts the chain, so that all sessions share one graph.
        return DraftTreeShape(num_nodes, 1, num_nodes, has_distribution)
    depth = min(tree_depth(num_nodes, plan.depth), room)
    if has_distribution:
        # The session began with a chain plan on the device; trees under this rule are grown only on
        # the host, so it continues with a chain.
        return DraftTreeShape(depth, 1, depth, has_distribution)
    return DraftTreeShape(num_nodes, plan.top_k, depth)
