"""SmallModelProposer: drafts by a separate small language model with the target's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.current_device import is_device_usable
from outrider.engine.kv_cache import KVSequence
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.errors import ResourceExhaustedError
from outrider.spec.plan import DraftMethod
from outrider.wire.messages import FeatureLayout, WireTensor
from outrider_drafter.proposers.forest import DraftForest, ForestTrees, StepRows
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    SessionDrafts,
    empty_scores,
)
from outrider_drafter.proposers.outcome_drafting import (
    ScoredProposals,
    draft_outcomes,
    score_proposals,
)
from outrider_drafter.proposers.tree_growth import GrowthJob, grow_trees, make_growth_job
from outrider_drafter.state.session import FollowedSession, SessionKey

MAX_ROWS_PER_FORWARD = 512
MIN_ROWS_AHEAD = 32
"""Minimum number of new rows for which a separate forward pass is run before a draft. Fewer new
rows are run as part of the next draft, at hardly any extra cost."""
DRAFT_KV_SLOTS = 128
"""Number of KV slots for draft rows in addition to a session's own tokens. Larger trees are not
drafted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefix:
    """A session's KV and its tokens without KV, the root last."""

    sequence: KVSequence
    token_ids: Tensor


class _SmallForest(DraftForest):
    """`DraftForest` of a small model. Draft rows are committed after the real tokens of their
    sequences until they are dropped.

    A mask over the draft rows separates the branches.
    """

    def __init__(self, model: TargetModel, vocab_size: int, prefixes: Sequence[_Prefix]) -> None:
        super().__init__([p.sequence.len + p.token_ids.shape[0] for p in prefixes])
        self._model = model
        self._vocab_size = vocab_size
        self._sequences = [p.sequence for p in prefixes]
        ends = np.cumsum([p.token_ids.shape[0] for p in prefixes])
        self._root_logits = _run(
            model,
            torch.cat([p.token_ids for p in prefixes]),
            [_causal(p) for p in prefixes],
            torch.from_numpy(ends - 1),
        )

    def root_logits(self) -> Tensor:
        """Return the logits [L, V] at the roots, where V is the target's vocabulary size."""
        return self._root_logits[:, : self._vocab_size]

    def rows_left(self, owner: int) -> int:
        """Return the number of free KV slots of the sequence of session `owner`."""
        return self._sequences[owner].capacity - self._sequences[owner].len

    def levels_left(self, owner: int) -> int:
        """Return the capacity of the session's sequence; KV slots and the session's maximum length
        are the only real limits."""
        return self._sequences[owner].capacity

    def _run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        positions: Sequence[int],
        spans: Sequence[StepRows],
    ) -> Tensor:
        where = torch.tensor(positions)
        segments = [
            Segment(
                sequence=self._sequences[owner],
                num_rows=size,
                positions=where[first : first + size],
                mask=None if visible is None else torch.from_numpy(visible),
            )
            for owner, first, size, visible in spans
        ]
        logits = _run(self._model, torch.tensor(tokens), segments, None)
        return logits[:, : self._vocab_size]

    def _drop(self, kept: Sequence[int]) -> None:
        for sequence, base, rows in zip(self._sequences, self._bases, kept, strict=True):
            sequence.truncate(base + rows)

    def forget_tree(self, owner: int) -> None:
        """Drop the draft rows of a session, which may have ended. The session cannot be drafted in
        this forest any more."""
        if not self._sequences[owner].is_released:
            self._sequences[owner].truncate(self._bases[owner])

    def forget(self) -> None:
        """Drop the draft rows of all sessions."""
        for owner in range(len(self._sequences)):
            self.forget_tree(owner)


class SmallModelProposer:
    """Proposer with a small language model. Its KV can be rebuilt from the tokens at any time."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""

    def __init__(self, model: TargetModel, *, vocab_size: int) -> None:
        """Create a proposer without sessions. `vocab_size`: size of the target's vocabulary; larger
        ids, which are padding of the draft model's vocabulary, are cut off."""
        self._model = model
        self._vocab_size = vocab_size
        self._sequences: dict[SessionKey, KVSequence] = {}
        self._ahead: ScoredProposals | None = None
        """The proposals that were scored last; None if something else was drafted since."""
        self._forest: _SmallForest | None = None
        """Forest with the rows of the proposals that were scored last."""

    @property
    def is_usable(self) -> bool:
        """Whether the device still works. Waits for all launched work."""
        return is_device_usable(self._model.device)

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Return the data unchanged. Not called, because this proposer needs no features."""
        return wire.data

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Run the model on the new tokens, except the newest one, of each session that drafts with
        this model."""
        self._forget()
        for session in sessions:
            if session.plan.method is self.method:
                self._run_ahead(session)

    @torch.inference_mode()
    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Run the model on the sessions' new tokens, then grow the draft trees of all sessions in
        one batch."""
        ready: list[FollowedSession] = []
        jobs: list[GrowthJob] = []
        prefixes: list[_Prefix] = []
        self._forget()
        for session in sessions:
            job = make_growth_job(len(jobs), session)
            prefix = self._prefix(session, slots=job.growth.max_rows) if job else None
            if job and prefix:
                ready.append(session)
                jobs.append(job)
                prefixes.append(prefix)
        if not jobs:
            return
        forest = _SmallForest(self._model, self._vocab_size, prefixes)
        for slot, draft in grow_trees(ForestTrees.below_roots(forest), jobs):
            forest.forget_tree(slot)
            yield SessionDrafts.of_drafts([(ready[slot], draft)])

    @torch.inference_mode()
    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Run the model on the sessions' new tokens and then, level by level, on all nodes of all
        proposals. Return the candidates for the next token at each root and node."""
        self._forget()
        ready: list[int] = []
        prefixes: list[_Prefix] = []
        for index, live in enumerate(lives):
            prefix = self._prefix(live.session, slots=len(live.tree))
            if prefix is not None:
                ready.append(index)
                prefixes.append(prefix)
        if not ready:
            return empty_scores(lives)
        self._forest = _SmallForest(self._model, self._vocab_size, prefixes)
        self._ahead, scored = score_proposals(self._forest, lives, ready)
        return scored

    @torch.inference_mode()
    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Grow drafts for outcomes below the rows of the proposals that were scored last, in as few
        batches as the sessions have KV slots for."""
        if self._ahead is not None:
            yield from draft_outcomes(self._ahead, outcomes)

    def release_session(self, session: FollowedSession) -> None:
        """Free the session's KV."""
        sequence = self._sequences.pop(session.key, None)
        if sequence is not None:
            sequence.release()

    def _forget(self) -> None:
        """Drop the scored proposals, so that sequences contain real tokens only."""
        if self._forest is not None:
            self._forest.forget()
        self._forest = self._ahead = None

    def _prefix(self, session: FollowedSession, *, slots: int) -> _Prefix | None:
        """Return the tokens that are still to be run, the root last, or None if the session or its
        `slots` draft rows do not fit."""
        sequence = self._run_ahead(session)
        if sequence is None or len(session.tokens) + slots > sequence.capacity:
            return None
        sequence.truncate(min(sequence.len, len(session.tokens) - 1))
        return _Prefix(sequence=sequence, token_ids=_ids(session.tokens.view[sequence.len :]))

    def _run_ahead(self, session: FollowedSession) -> KVSequence | None:
        """Run new tokens, except the newest, if there are at least `MIN_ROWS_AHEAD`. Return the
        session's KV, or None if the session does not fit."""
        ids = session.tokens.view
        sequence = self._sequences.get(session.key)
        if sequence is None:
            sequence = self._allocate(session)
        if sequence is None or not len(ids):
            return None
        if int(ids[sequence.len :].max(initial=0)) >= self._model.vocab_size:
            return None
        while len(ids) - 1 - sequence.len >= MIN_ROWS_AHEAD:
            end = min(sequence.len + MAX_ROWS_PER_FORWARD, len(ids) - 1)
            part = _Prefix(sequence=sequence, token_ids=_ids(ids[sequence.len : end]))
            _run(self._model, part.token_ids, [_causal(part)], torch.empty(0, dtype=torch.int64))
        return sequence

    def _allocate(self, session: FollowedSession) -> KVSequence | None:
        if session.max_len > self._model.config.max_position_embeddings:
            return None
        try:
            sequence = self._model.pool.allocate(session.max_len + DRAFT_KV_SLOTS)
        except ResourceExhaustedError:
            return None
        self._sequences[session.key] = sequence
        return sequence


def _ids(tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def _causal(prefix: _Prefix) -> Segment:
    start, rows = prefix.sequence.len, prefix.token_ids.shape[0]
    return Segment(
        sequence=prefix.sequence, num_rows=rows, positions=torch.arange(start, start + rows)
    )


def _run(
    model: TargetModel, token_ids: Tensor, segments: Sequence[Segment], logit_rows: Tensor | None
) -> Tensor:
    """Run a forward pass, commit the KV of every row and return the logits. Tensors in `segments`
    are moved to the device."""
    device = model.device
    for segment in segments:
        segment.positions = segment.positions.to(device)
        segment.mask = None if segment.mask is None else segment.mask.to(device)
    rows = None if logit_rows is None else logit_rows.to(device)
    batch = ForwardBatch(token_ids=token_ids.to(device), segments=segments, logit_rows=rows)
    out = model.forward(batch)
    for segment in segments:
        segment.sequence.commit(range(segment.num_rows))
    return out.logits
