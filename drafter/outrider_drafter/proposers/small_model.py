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
"""Fewer rows are left to the next draft, whose batch runs them at hardly any extra cost."""
DRAFT_KV_SLOTS = 128
"""KV slots kept for draft rows beside a session's own tokens; larger trees are not drafted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prefix:
    """A slot's KV and its tokens that have none yet, the root last."""

    sequence: KVSequence
    token_ids: Tensor


class _SmallForest(DraftForest):
    """Draft rows committed behind the real tokens of their sequences, until they are forgotten.

    A mask over the draft rows keeps the branches apart.
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
        """Logits [L, V] below the roots."""
        return self._root_logits[:, : self._vocab_size]

    def rows_left(self, owner: int) -> int:
        """Slots that the sequence has left."""
        return self._sequences[owner].capacity - self._sequences[owner].len

    def levels_left(self, owner: int) -> int:
        """No bound but those of slots and of the session's length."""
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
        """Forget the draft rows of a session, which may have ended; it can draft no more here."""
        if not self._sequences[owner].is_released:
            self._sequences[owner].truncate(self._bases[owner])

    def forget(self) -> None:
        """Forget the draft rows of all sessions."""
        for owner in range(len(self._sequences)):
            self.forget_tree(owner)


class SmallModelProposer:
    """A small language model as a proposer; its KV can be rebuilt from tokens at any time."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""

    def __init__(self, model: TargetModel, *, vocab_size: int) -> None:
        """`vocab_size` is the target's; ids beyond it (padding of the model's own) are cut off."""
        self._model = model
        self._vocab_size = vocab_size
        self._sequences: dict[SessionKey, KVSequence] = {}
        self._ahead: ScoredProposals | None = None
        """The proposals scored last, if nothing was drafted since."""
        self._forest: _SmallForest | None = None
        """Rows of the proposals scored last."""

    @property
    def is_usable(self) -> bool:
        """Whether the device still works; waits for all that was launched."""
        return is_device_usable(self._model.device)

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """Not asked for: the source takes no features."""
        return wire.data

    @torch.inference_mode()
    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Run the tokens of sessions that draft by this model, but for the newest of each."""
        self._forget()
        for session in sessions:
            if session.plan.method is self.method:
                self._run_ahead(session)

    @torch.inference_mode()
    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Catch up, then grow the trees of all sessions in one batch."""
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
        """Catch up, then run all nodes of all proposals, level by level."""
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
        """Grow drafts together, below the rows of the proposals scored last: as many at a time as
        the sessions have slots for."""
        if self._ahead is not None:
            yield from draft_outcomes(self._ahead, outcomes)

    def release_session(self, session: FollowedSession) -> None:
        """Free the session's KV."""
        sequence = self._sequences.pop(session.key, None)
        if sequence is not None:
            sequence.release()

    def _forget(self) -> None:
        """Let go of what was scored: sequences hold real tokens only from here on."""
        if self._forest is not None:
            self._forest.forget()
        self._forest = self._ahead = None

    def _prefix(self, session: FollowedSession, *, slots: int) -> _Prefix | None:
        """What is left to run, the root last, with room for `slots` draft rows; None if none."""
        sequence = self._run_ahead(session)
        if sequence is None or len(session.tokens) + slots > sequence.capacity:
            return None
        sequence.truncate(min(sequence.len, len(session.tokens) - 1))
        return _Prefix(sequence=sequence, token_ids=_ids(session.tokens.view[sequence.len :]))

    def _run_ahead(self, session: FollowedSession) -> KVSequence | None:
        """Run whole passes of tokens short of the newest; None if the session does not fit."""
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
    """Forward, and commit every row; tensors of `segments` too may be the host's."""
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
