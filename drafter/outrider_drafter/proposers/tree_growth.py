"""Grows draft trees: chain, beam and static trees as state machines, and the passes that feed them.

`grow_trees` grows the trees of many sessions with one batched model pass per level. A `TreeGrowth`
receives the candidates of one level after another and returns the rows to run next (the frontier);
it never calls a model. Candidates come best first within a row. Scores are sums of fp32 log-probs,
and ties go to the lower candidate index; a child never scores above its parent and always has a
higher index, so it cannot be chosen without its parent. Letters in shapes: R rows of a step; k
candidates of a row; Vd draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.draft_sampling import (
    DistributionLimits,
    distribution_limits_for,
    propose_children,
)
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory, has_penalties
from outrider.spec.digest import extend_digest
from outrider.spec.draft_distribution import (
    DistributionEntries,
    make_distribution,
)
from outrider.spec.noise import NoiseStream, prefix_keys
from outrider.spec.plan import SpeculationPlan, tree_depth
from outrider.spec.sampling import SamplingParams
from outrider.spec.tree import ROOT, DraftTree
from outrider_drafter.proposers.interface import ProposedDraft
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_grammars import masks_of

_RANK_PRIOR = 0.62
"""Assumed probability that a node's first child is accepted. Each later child gets the same share
of the remaining probability."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateRows:
    """Candidate tokens after each of R rows. A log-prob of -inf marks an unused entry."""

    tokens: NDArray[np.int64]
    """[R, k]: target ids, best first."""
    logprobs: NDArray[np.float32]
    """[R, k]: log-probs of the candidates."""
    distributions: Sequence[DistributionEntries | None] = ()
    """Distribution that each row's candidates were drawn from; empty unless the acceptance rule
    needs distributions."""


class StepFrontier(NamedTuple):
    """Frontier of a growing tree, that is the rows to run in the next step. `parents` holds the
    index of each row's parent among the tree's rows of the previous step."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


NO_FRONTIER = StepFrontier((), ())


class TreeGrowth(Protocol):
    """State machine that grows one draft tree, level by level. It never calls a model."""

    top_k: int
    """Number of candidates that are needed for each row."""
    max_rows: int
    """Maximum number of rows that are run for this tree in all steps together."""
    depth: int
    """Maximum number of levels."""

    def add_level(self, children: CandidateRows) -> StepFrontier:
        """Add the candidates after each row of the current frontier, which is the root at first.
        Return the next frontier, which is empty when the tree is complete."""
        ...

    def path_to(self, row: int) -> tuple[int, ...]:
        """Return the tokens from the first level to the given row of the current frontier."""
        ...

    def finish_draft(self) -> ProposedDraft:
        """Return the finished tree."""
        ...


def make_growth(plan: SpeculationPlan, *, room: int, has_distribution: bool) -> TreeGrowth | None:
    """Return a new state machine that grows a draft tree for `plan` with at most `room` levels, or
    None if nothing can be drafted. `has_distribution`: whether the draft is sent with its draft
    distributions."""
    num_nodes = plan.draft_tokens
    if num_nodes <= 0 or room <= 0:
        return None
    if plan.top_k == 1:
        length = min(num_nodes, room)
        return (
            StaticGrowth(static_shape(length, 1, length))
            if has_distribution
            else ChainGrowth(length)
        )
    depth = min(tree_depth(num_nodes, plan.depth), room)
    if has_distribution:
        return StaticGrowth(static_shape(num_nodes, plan.top_k, depth))
    return BeamGrowth(num_nodes=num_nodes, top_k=plan.top_k, depth=depth)


class ChainGrowth:
    """`TreeGrowth` of a chain, with one candidate for each level."""

    def __init__(self, length: int) -> None:
        self.top_k = 1
        self.max_rows = length - 1
        self.depth = length
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def add_level(self, children: CandidateRows) -> StepFrontier:
        """Append the first candidate to the chain. If its log-prob is -inf, there is no candidate,
        and the chain ends."""
        logprob = float(children.logprobs[0, 0])
        if logprob == -math.inf:
            return NO_FRONTIER
        self._tokens.append(int(children.tokens[0, 0]))
        self._logprobs.append(min(logprob, 0.0))
        return (
            NO_FRONTIER
            if len(self._tokens) == self.depth
            else StepFrontier((self._tokens[-1],), (0,))
        )

    def path_to(self, row: int) -> tuple[int, ...]:
        """Return all tokens so far."""
        return tuple(self._tokens)

    def finish_draft(self) -> ProposedDraft:
        """Return the chain."""
        tree = DraftTree(
            tokens=np.asarray(self._tokens, dtype=np.int32),
            parents=np.arange(-1, len(self._tokens) - 1, dtype=np.int32),
            logprobs=np.cumsum(self._logprobs, dtype=np.float32),
        )
        return ProposedDraft(tree=tree)


class BeamGrowth:
    """`TreeGrowth` of EAGLE-2's dynamic tree. It expands the best `top_k` nodes of each level and
    finally keeps the best `num_nodes` nodes of all levels.

    A node outside the best `num_nodes` so far can never be among them later, and neither can its
    descendants. Such nodes are not expanded, which saves rows and does not change the tree.
    """

    def __init__(self, *, num_nodes: int, top_k: int, depth: int) -> None:
        self.top_k = top_k
        self.max_rows = top_k * (depth - 1)
        self._num_nodes = num_nodes
        self.depth = depth
        self._level = 0
        self._tokens = np.empty(0, dtype=np.int64)
        self._parents = np.empty(0, dtype=np.int64)
        self._scores = np.empty(0, dtype=np.float32)
        self._frontier = np.array([ROOT])
        """Candidate index of each row of the current step."""

    def add_level(self, children: CandidateRows) -> StepFrontier:
        """Add the candidates and choose the next frontier."""
        k = children.tokens.shape[1]
        above = self._scores[self._frontier] if self._level else np.zeros(1, dtype=np.float32)
        scores = above[:, None] + np.minimum(children.logprobs, np.float32(0.0))
        scores[np.isnan(scores)] = -np.inf
        first = len(self._tokens)
        self._tokens = np.concatenate((self._tokens, children.tokens.ravel()))
        self._parents = np.concatenate((self._parents, np.repeat(self._frontier, k)))
        self._scores = np.concatenate((self._scores, scores.ravel()))
        self._level += 1
        if self._level == self.depth:
            return NO_FRONTIER
        best = [i for i in self._best() if i >= first][: self.top_k]
        self._frontier = np.asarray(best, dtype=np.int64)
        return StepFrontier(
            tuple(int(self._tokens[i]) for i in best), tuple((i - first) // k for i in best)
        )

    def _best(self) -> list[int]:
        """Return the candidate indices of the best `num_nodes`, best first."""
        order = np.argsort(-self._scores, kind="stable")[: self._num_nodes]
        return [int(i) for i in order if self._scores[i] > -np.inf]

    def path_to(self, row: int) -> tuple[int, ...]:
        """Return the tokens from the first level to a row of the frontier."""
        tokens: list[int] = []
        node = int(self._frontier[row])
        while node != ROOT:
            tokens.append(int(self._tokens[node]))
            node = int(self._parents[node])
        return tuple(reversed(tokens))

    def finish_draft(self) -> ProposedDraft:
        """Return the chosen nodes in candidate order: parents first, siblings best first."""
        chosen = sorted(self._best())
        place = {candidate: i for i, candidate in enumerate(chosen)} | {ROOT: ROOT}
        tree = DraftTree(
            tokens=self._tokens[chosen].astype(np.int32),
            parents=np.array([place[int(self._parents[c])] for c in chosen], dtype=np.int32),
            logprobs=self._scores[chosen],
        )
        return ProposedDraft(tree=tree)


class StaticTreeShape(NamedTuple):
    """Shape of a draft tree, fixed before any token is drawn. Nodes are in level order."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    """Index of each node among the candidates of its parent."""
    depth: int


@lru_cache(maxsize=256)
def static_shape(num_nodes: int, top_k: int, depth: int) -> StaticTreeShape:
    """Return the tree shape whose nodes are most likely to be accepted, if acceptance depends only
    on a child's rank among its siblings and falls geometrically with it. `num_nodes`: number of
    nodes; `top_k`: maximum number of children of a node; `depth`: maximum number of levels."""
    weights = [math.log(_RANK_PRIOR) + r * math.log(1.0 - _RANK_PRIOR) for r in range(top_k)]
    heap: list[tuple[float, tuple[int, ...]]] = [(-weights[0], (0,))]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < num_nodes:
        cost, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < depth:
            heapq.heappush(heap, (cost - weights[0], (*path, 0)))
        if path[-1] + 1 < top_k:
            step = weights[path[-1] + 1] - weights[path[-1]]
            heapq.heappush(heap, (cost - step, (*path[:-1], path[-1] + 1)))
    chosen.sort(key=lambda path: (len(path), path))
    place = {path: i for i, path in enumerate(chosen)} | {(): ROOT}
    return StaticTreeShape(
        parents=tuple(place[path[:-1]] for path in chosen),
        ranks=tuple(path[-1] for path in chosen),
        depth=max(len(path) for path in chosen),
    )


class StaticGrowth:
    """`TreeGrowth` for the rejection rule. The shape of the tree never depends on the tokens that
    were drawn.

    Choosing nodes by the scores of the sampled tokens would change the distribution that the
    verifier divides by. A node of the shape stays empty only if its parent's distribution has too
    few ids.
    """

    def __init__(self, shape: StaticTreeShape) -> None:
        self._shape = shape
        self._below = _children_of(shape)
        self.top_k = max(len(places) for places in self._below.values())
        self.max_rows = len(self._below) - 1
        self.depth = shape.depth
        self._tokens: dict[int, int] = {}
        self._scores: dict[int, float] = {}
        self._distributions: dict[int, DistributionEntries] = {}
        self._frontier: tuple[int, ...] = (ROOT,)

    def add_level(self, children: CandidateRows) -> StepFrontier:
        """Fill the nodes below the frontier. The next frontier contains those of the filled nodes
        that have children in the shape."""
        for row, parent in enumerate(self._frontier):
            distribution = children.distributions[row] if children.distributions else None
            if distribution is not None:
                self._distributions[parent] = distribution
            for place in self._below[parent]:
                self._fill(place, parent, children, row)
        rows = {parent: row for row, parent in enumerate(self._frontier)}
        nodes = [
            place
            for parent in self._frontier
            for place in self._below[parent]
            if place in self._tokens and place in self._below
        ]
        self._frontier = tuple(nodes)
        return StepFrontier(
            tokens=tuple(self._tokens[n] for n in nodes),
            parents=tuple(rows[self._shape.parents[n]] for n in nodes),
        )

    def _fill(self, place: int, parent: int, children: CandidateRows, row: int) -> None:
        rank = self._shape.ranks[place]
        logprob = float(children.logprobs[row, rank])
        if logprob > -math.inf:
            self._tokens[place] = int(children.tokens[row, rank])
            self._scores[place] = self._scores.get(parent, 0.0) + min(logprob, 0.0)

    def path_to(self, row: int) -> tuple[int, ...]:
        """Return the tokens from the first level to a row of the frontier."""
        tokens: list[int] = []
        node = self._frontier[row]
        while node != ROOT:
            tokens.append(self._tokens[node])
            node = self._shape.parents[node]
        return tuple(reversed(tokens))

    def finish_draft(self) -> ProposedDraft:
        """Return the filled nodes in level order, with the distribution of every expanded node."""
        filled = sorted(self._tokens)
        place = {node: i for i, node in enumerate(filled)} | {ROOT: ROOT}
        parents = [place[self._shape.parents[n]] for n in filled]
        tree = DraftTree(
            tokens=np.array([self._tokens[n] for n in filled], dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
            logprobs=np.array([self._scores[n] for n in filled], dtype=np.float32),
        )
        slots = {
            p + 1: self._distributions[node]
            for node, p in place.items()
            if node in self._distributions
        }
        # An expanded node has children: its distribution holds at least one id, and rank 0 is a
        # place.
        return ProposedDraft(
            tree=tree, distribution=make_distribution(len(tree), slots) if slots else None
        )


def _children_of(shape: StaticTreeShape) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for place, parent in enumerate(shape.parents):
        below.setdefault(parent, []).append(place)
    return below


class TreeDraftModel(Protocol):
    """Draft model that runs the levels of several draft trees together, after it has processed the
    prefix of each tree.

    A slot is the number of a tree, as in `GrowthJob.slot`.
    """

    @property
    def target_ids(self) -> Tensor | None:
        """Target id of every draft id, int64 [Vd]; None if the vocabulary is the target's."""
        ...

    def root_logits(self) -> Tensor:
        """Return the logits [slots, Vd] at each slot's root."""
        ...

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        """Run one level, given as (slot, frontier) pairs, and return the logits [R, Vd] of its rows
        in this order.

        A frontier's parents are indices into the rows of its slot in the previous step.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class GrowthJob:
    """Draft tree of one session while it grows."""

    slot: int
    growth: TreeGrowth
    sampling: SamplingParams
    prefix_len: int
    history: TokenHistory | None
    """Prompt and output so far, for penalties; None unless a penalty is set."""
    session: FollowedSession | None = None
    """Session whose constraint masks the draft; None for an unmasked draft."""
    suffix: tuple[int, ...] = ()
    """Tokens between the session's tokens and the draft."""


def make_growth_job(
    slot: int, session: FollowedSession, suffix: Sequence[int] = ()
) -> GrowthJob | None:
    """Return the job that drafts after a session's tokens followed by `suffix`, or None if nothing
    can be drafted. `slot`: number of the tree in its `TreeDraftModel`."""
    room = session.draft_levels_left - len(suffix)
    growth = make_growth(session.plan, room=room, has_distribution=session.ships_distributions)
    if growth is None:
        return None
    return GrowthJob(
        slot=slot,
        growth=growth,
        sampling=_draft_sampling(session, suffix),
        prefix_len=len(session.tokens) + len(suffix),
        history=penalty_history(session, suffix),
        session=session,
        suffix=tuple(suffix),
    )


def penalty_history(session: FollowedSession, suffix: Sequence[int] = ()) -> TokenHistory | None:
    """Return the tokens that sampling penalties count: the session's prompt, and its output
    followed by `suffix`. Return None if no penalty is set."""
    if not has_penalties(session.sampling):
        return None
    tokens = session.tokens.view
    output = [tokens[session.prompt_len :], np.array(suffix, dtype=np.int32)]
    return TokenHistory(
        prompt_ids=tokens[: session.prompt_len].copy(), output_ids=np.concatenate(output)
    )


def _draft_sampling(session: FollowedSession, suffix: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters for a draft; see `FollowedSession.uses_prefix_noise`."""
    sampling = session.sampling
    if not session.uses_prefix_noise:
        return sampling
    digest = extend_digest(session.digest, suffix)
    key = int(prefix_keys(sampling.stream_key(NoiseStream.DRAFT), digest))
    return replace(sampling, seed=0, draft_key=key)


def grow_trees(
    model: TreeDraftModel, jobs: Sequence[GrowthJob]
) -> Iterator[tuple[int, ProposedDraft]]:
    """Grow the trees of all jobs together, one level at a time. Yields a (slot, draft) pair for
    each tree as soon as it is complete."""
    active = [(job, StepFrontier((0,), (0,))) for job in jobs]
    logits = model.root_logits()
    level = 0
    while active:
        following: list[tuple[GrowthJob, StepFrontier]] = []
        for (job, _), children in zip(active, _children(model, logits, active, level), strict=True):
            frontier = job.growth.add_level(children)
            if frontier.tokens:
                following.append((job, frontier))
            else:
                yield job.slot, job.growth.finish_draft()
        active, level = following, level + 1
        if active:
            logits = model.step([(job.slot, frontier) for job, frontier in active])


def _children(
    model: TreeDraftModel,
    logits: Tensor,
    active: Sequence[tuple[GrowthJob, StepFrontier]],
    level: int,
) -> list[CandidateRows]:
    """Return the candidates of each active job's rows, with one call of the sampler for each
    distinct top_k."""
    starts = np.cumsum([0] + [len(frontier.tokens) for _, frontier in active]).tolist()
    found: dict[int, CandidateRows] = {}
    for top_k in {job.growth.top_k for job, _ in active}:
        members = [i for i, (job, _) in enumerate(active) if job.growth.top_k == top_k]
        rows = [row for i in members for row in range(starts[i], starts[i + 1])]
        part = logits if len(rows) == logits.shape[0] else logits[rows]
        candidates = _propose(model, part, [active[i] for i in members], level, top_k)
        offset = 0
        for i in members:
            count = starts[i + 1] - starts[i]
            found[i] = CandidateRows(
                tokens=candidates.tokens[offset : offset + count],
                logprobs=candidates.logprobs[offset : offset + count],
                distributions=candidates.distributions[offset : offset + count],
            )
            offset += count
    return [found[i] for i in range(len(active))]


def _propose(
    model: TreeDraftModel,
    logits: Tensor,
    members: Sequence[tuple[GrowthJob, StepFrontier]],
    level: int,
    top_k: int,
) -> CandidateRows:
    sampling: list[SamplingParams] = []
    positions: list[int] = []
    histories: list[TokenHistory] = []
    limits: list[DistributionLimits] = []
    for job, frontier in members:
        rows = len(frontier.tokens)
        sampling += [job.sampling] * rows
        # A child of a node at depth d becomes the token at prefix_len + d.
        positions += [job.prefix_len + level] * rows
        histories += _histories(job, rows, level)
        # The root and every row that runs ship a distribution; per row, so that no batch changes
        # one.
        limits += [distribution_limits_for(1 + job.growth.max_rows)] * rows
    found = propose_children(
        logits, model.target_ids, sampling, positions, top_k, histories, distribution_limits=limits
    )
    return CandidateRows(
        tokens=found.tokens.cpu().numpy(),
        logprobs=found.logprobs.cpu().numpy(),
        distributions=found.distributions,
    )


def _histories(job: GrowthJob, rows: int, level: int) -> list[TokenHistory]:
    session = job.session
    masked = session is not None and session.constraint is not None
    if job.history is None and not masked:
        return [EMPTY_HISTORY] * rows
    paths = [job.growth.path_to(row) if level else () for row in range(rows)]
    if job.history is None:
        histories = [EMPTY_HISTORY] * rows
    else:
        histories = [replace(job.history, path_ids=path) for path in paths]
    masks = None
    if session is not None:
        masks = masks_of(session, [(*job.suffix, *path) for path in paths])
    if masks is None:
        return histories
    return [replace(each, allowed_tokens=mask) for each, mask in zip(histories, masks, strict=True)]
