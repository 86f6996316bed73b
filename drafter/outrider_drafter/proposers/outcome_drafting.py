"""Scores pending proposals and drafts for their outcomes in a forest, for all host proposers.

Letters in shapes: R rows of a step; Vd draft vocabulary. A place is the root or a node of a
proposal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.draft_sampling import propose_children
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory
from outrider.spec.sampling import Rule, SamplingParams
from outrider.spec.tree import ROOT, DraftTree, depths, path
from outrider_drafter.proposers.forest import DraftForest, ForestTrees
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    SessionDrafts,
    empty_candidates,
)
from outrider_drafter.proposers.tree_growth import (
    GrowthJob,
    grow_trees,
    make_growth_job,
    penalty_history,
)
from outrider_drafter.state.session_grammars import masks_of

MAX_CANDIDATES: Final = 32
"""Maximum number of candidates for the next token at the root and at each node of a proposal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredProposals:
    """Pending proposals whose nodes were run through the draft model. Drafts for their outcomes
    continue from the rows of these nodes. The keys of `owners` and `rows` are indices of
    proposals."""

    proposals: Sequence[PendingProposal]
    """All proposals that were passed to `score_proposals`."""
    owners: dict[int, int]
    """Number of the root in `forest` of each proposal that could be run."""
    rows: dict[int, NDArray[np.int64]]
    """Numbers of the rows in `forest` of each proposal that could be run, int64 [1 + n] for a
    proposal of n nodes: first the root, then the nodes."""
    forest: DraftForest


def score_proposals(
    forest: DraftForest, lives: Sequence[PendingProposal], ready: Sequence[int]
) -> tuple[ScoredProposals, OutcomeScores]:
    """Run all nodes of the proposals whose indices are in `ready`. Return their rows, for
    `draft_outcomes`, and the scores of all proposals `lives`. The forest must have the roots of the
    `ready` proposals, in this order."""
    owners = {live: owner for owner, live in enumerate(ready)}
    rows = {live: np.full(len(lives[live].tree) + 1, owners[live]) for live in ready}
    logits = forest.root_logits()
    width = min(MAX_CANDIDATES, logits.shape[1])
    at = [(live, ROOT) for live in ready]
    found = [_candidates(forest, logits, lives, at, width, level=0)]
    levels = {live: _levels(lives[live].tree) for live in ready}
    for level in range(1, 1 + max((len(them) for them in levels.values()), default=0)):
        at = [(live, n) for live in ready for one in levels[live][level - 1 : level] for n in one]
        first = len(forest)
        for row, (live, node) in enumerate(at, start=first):
            rows[live][node + 1] = row
        tokens = [int(lives[live].tree.tokens[node]) for live, node in at]
        parents = [int(rows[live][lives[live].tree.parents[node] + 1]) for live, node in at]
        logits = forest.step(tokens, parents)
        found.append(_candidates(forest, logits, lives, at, width, level=level))
    forest.save_checkpoint()
    ids = np.concatenate([part[0] for part in found])
    logprobs = np.concatenate([part[1] for part in found])
    no_ids, no_logprobs = empty_candidates(lives, width)
    scored = OutcomeScores.of_candidates(
        lives,
        [ids[rows[i]] if i in rows else none for i, none in enumerate(no_ids)],
        [logprobs[rows[i]] if i in rows else none for i, none in enumerate(no_logprobs)],
    )
    return ScoredProposals(proposals=lives, owners=owners, rows=rows, forest=forest), scored


def draft_outcomes(ahead: ScoredProposals, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
    """Draft for outcomes of the proposals in `ahead`, in as few batches as the free rows of the
    forest allow. Outcomes that cannot be drafted for are left out."""
    forest = ahead.forest
    waiting: list[tuple[int, GrowthJob]] = []
    for index, outcome in enumerate(outcomes):
        job = _job(ahead, outcome) if outcome.live in ahead.owners else None
        if job is not None:
            waiting.append((index, job))
    # Rows of one session must be adjacent.
    waiting.sort(key=lambda entry: ahead.owners[outcomes[entry[0]].live])
    while waiting:
        forest.restore_checkpoint()
        used: dict[int, int] = {}
        wave: list[tuple[int, GrowthJob]] = []
        rest: list[tuple[int, GrowthJob]] = []
        for index, job in waiting:
            owner, size = ahead.owners[outcomes[index].live], 1 + job.growth.max_rows
            fits = used.get(owner, 0) + size <= forest.rows_left(owner)
            if fits:
                used[owner] = used.get(owner, 0) + size
            (wave if fits else rest).append((index, job))
        if not wave:
            break
        yield _grown(ahead, outcomes, wave)
        waiting = rest
    forest.restore_checkpoint()


def _grown(
    ahead: ScoredProposals, outcomes: Sequence[Outcome], wave: Sequence[tuple[int, GrowthJob]]
) -> OutcomeDrafts:
    for slot, (_, job) in enumerate(wave):
        job.slot = slot
    chosen = [outcomes[index] for index, _ in wave]
    model = ForestTrees.below_outcomes(
        ahead.forest,
        [outcome.token for outcome in chosen],
        [int(ahead.rows[outcome.live][outcome.node + 1]) for outcome in chosen],
    )
    grown = list(grow_trees(model, [job for _, job in wave]))
    sessions = [ahead.proposals[chosen[slot].live].session for slot, _ in grown]
    drafted = SessionDrafts.of_drafts(
        [(session, draft) for session, (_, draft) in zip(sessions, grown, strict=True)]
    )
    made = np.array([wave[slot][0] for slot, _ in grown], dtype=np.int64)
    return OutcomeDrafts.of_drafts(made, drafted)


def _job(ahead: ScoredProposals, outcome: Outcome) -> GrowthJob | None:
    live = ahead.proposals[outcome.live]
    suffix = [*_tokens_to(live.tree, outcome.node), outcome.token]
    job = make_growth_job(0, live.session, suffix)
    if job is None:
        return None
    fits = len(suffix) + job.growth.depth <= ahead.forest.levels_left(ahead.owners[outcome.live])
    return job if fits else None


def _candidates(
    forest: DraftForest,
    logits: Tensor,
    lives: Sequence[PendingProposal],
    at: Sequence[tuple[int, int]],
    width: int,
    *,
    level: int,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the ids and log-probs [R, width] of the candidates at these (proposal, node) places,
    all at depth `level`. `logits` [R, Vd]: logits at the places."""
    sampling: list[SamplingParams] = []
    positions: list[int] = []
    histories: list[TokenHistory] = []
    known: dict[int, tuple[SamplingParams, int, TokenHistory]] = {}
    for live, node in at:
        if live not in known:
            session = lives[live].session
            history = penalty_history(session) or EMPTY_HISTORY
            known[live] = _scored_with(session.sampling), len(session.tokens) + level, history
        params, position, history = known[live]
        if history is not EMPTY_HISTORY:
            history = replace(history, path_ids=_tokens_to(lives[live].tree, node))
        masks = masks_of(lives[live].session, [_tokens_to(lives[live].tree, node)])
        if masks is not None:
            history = replace(history, allowed_tokens=masks[0])
        sampling.append(params)
        positions.append(position)
        histories.append(history)
    found = propose_children(logits, forest.target_ids, sampling, positions, width, histories)
    return (
        found.tokens.cpu().numpy().astype(np.int32),
        found.logprobs.cpu().numpy().astype(np.float32),
    )


def _scored_with(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters for scoring. Under the rejection rule candidates are ranked by
    the draft distribution instead of being drawn from it."""
    if sampling.effective_rule is Rule.REJECTION:
        return replace(sampling, rule=Rule.TARGET_ONLY)
    return sampling


def _tokens_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(int(tree.tokens[at]) for at in path(tree.parents, node))


def _levels(tree: DraftTree) -> list[list[int]]:
    """Return the nodes of a tree by level."""
    of_node = depths(tree.parents).tolist()
    levels: list[list[int]] = [[] for _ in range(max(of_node, default=0))]
    for node, depth in enumerate(of_node):
        levels[depth - 1].append(node)
    return levels
