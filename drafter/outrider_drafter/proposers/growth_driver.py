"""Grows the draft trees of many sessions with one batched model pass per level."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from outrider.engine.draft_sampling import (
    DistributionLimits,
    distribution_limits_for,
    propose_children,
)
from outrider.engine.logits_processor import EMPTY_HISTORY, TokenHistory, has_penalties
from outrider.spec.digest import extend_digest
from outrider.spec.noise import NoiseStream, prefix_keys
from outrider.spec.sampling import SamplingParams
from outrider_drafter.proposers.tree_growth import (
    CandidateRows,
    ProposedDraft,
    StepFrontier,
    TreeGrowth,
    make_growth,
)
from outrider_drafter.state.session import FollowedSession
from outrider_drafter.state.session_grammars import masks_of


class TreeDraftModel(Protocol):
    """A draft model during tree growth: it has seen the prefix of every slot of the batch.

    R rows, Vd draft vocabulary. Slots are numbered as the jobs of `grow_trees`.
    """

    @property
    def target_ids(self) -> Tensor | None:
        """Target id of every draft id, int64 [Vd]; None if the vocabulary is the target's."""
        ...

    def root_logits(self) -> Tensor:
        """Logits [slots, Vd] below each slot's root."""
        ...

    def step(self, frontiers: Sequence[tuple[int, StepFrontier]]) -> Tensor:
        """Run one level: rows of (slot, frontier) in order; logits [R, Vd].

        A frontier's parents index the rows that its slot had in the step before.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class GrowthJob:
    """One session's tree in the making."""

    slot: int
    growth: TreeGrowth
    sampling: SamplingParams
    prefix_len: int
    history: TokenHistory | None
    """Prompt and output so far; None unless a penalty is set."""
    session: FollowedSession | None = None
    """Whose form masks the draft, if it has one."""
    suffix: tuple[int, ...] = ()
    """Tokens between the session's and the draft."""


def make_growth_job(
    slot: int, session: FollowedSession, suffix: Sequence[int] = ()
) -> GrowthJob | None:
    """The job of a session that wants a draft for its prefix with `suffix` appended; None if there
    is nothing to draft."""
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
    """What penalties look at, `suffix` counted as output; None if none is set."""
    if not has_penalties(session.sampling):
        return None
    tokens = session.tokens.view
    output = [tokens[session.prompt_len :], np.array(suffix, dtype=np.int32)]
    return TokenHistory(
        prompt_ids=tokens[: session.prompt_len].copy(), output_ids=np.concatenate(output)
    )


def _draft_sampling(session: FollowedSession, suffix: Sequence[int]) -> SamplingParams:
    """What a draft is drawn with; see `FollowedSession.uses_prefix_noise`."""
    sampling = session.sampling
    if not session.uses_prefix_noise:
        return sampling
    digest = extend_digest(session.digest, suffix)
    key = int(prefix_keys(sampling.stream_key(NoiseStream.DRAFT), digest))
    return replace(sampling, seed=0, draft_key=key)


def grow_trees(
    model: TreeDraftModel, jobs: Sequence[GrowthJob]
) -> Iterator[tuple[int, ProposedDraft]]:
    """Grow all trees; yields (slot, draft) as soon as each is complete."""
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
    """Candidates of each active job's rows: one call per distinct top_k."""
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
