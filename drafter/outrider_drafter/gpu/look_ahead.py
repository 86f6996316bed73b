"""Look-ahead on the GPU: scores pending proposals, then drafts for their outcomes.

Scores stay valid until the next scoring: drafts for outcomes need their sessions' real rows, which
look-ahead never writes, and the features of the scored positions, which are kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.transfer.buffers import DownloadBuffer
from outrider_drafter.gpu.batch import DraftBatch, LaunchSessions, StagedRows
from outrider_drafter.gpu.draft_launcher import DraftLauncher
from outrider_drafter.gpu.outcome_drafting import OutcomeDrafter, ScoredSessions
from outrider_drafter.gpu.outcome_scoring import MAX_SCORED_NODES, ProposalScorer, ProposalScores
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.gpu.scoring_layout import ProposalRange
from outrider_drafter.gpu.shapes import DraftTreeShape, ProposalShape
from outrider_drafter.proposers.interface import (
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
)


class GpuLookAhead:
    """Scores of the last pass, and the outcome drafts that begin there."""

    def __init__(
        self,
        program: LookAheadProgram,
        rows: PagedDraftKV,
        grower: DraftLauncher,
        graphs: GraphCache,
        landing: DownloadBuffer,
        *,
        dtype: torch.dtype,
        max_context: int,
        bounded: bool,
        sweeps: int,
        path_rows: tuple[int, ...],
    ) -> None:
        """`rows` with SCRATCH_BLOCKS; `max_context`, `bounded`, `sweeps`: as in the
        proposer; `path_rows`: the captured numbers of catch-up rows."""
        self._landing = landing
        self._scorer = ProposalScorer(program, rows, graphs, landing, dtype=dtype, sweeps=sweeps)
        self._brancher = OutcomeDrafter(
            program,
            rows,
            grower,
            graphs,
            landing,
            held=self._scorer.held,
            max_context=max_context,
            bounded=bounded,
            path_rows=path_rows,
        )
        self._lives: Sequence[PendingProposal] = ()
        self._scores = ProposalScores(())
        self._placed: dict[int, tuple[ProposalRange, DraftTreeShape]] = {}
        """By live proposal, those that are to be scored."""
        self._parts: list[tuple[LaunchSessions, Sequence[int]]] = []
        """What was launched, with the live proposals of the sessions."""
        self._held = 0
        """Rows of held places."""
        self._branching: ScoredSessions | None = None
        """Where branches begin; None if nothing was scored."""

    def warm_up_scores(
        self, nodes: ProposalShape, batch: DraftBatch, row_buckets: Sequence[int], *, warps: bool
    ) -> None:
        """Compile and capture the scoring of one form, with catch-ups of so many rows."""
        for size in nodes.batch_buckets:
            for num_rows in row_buckets:
                staged = batch.stage_rows(None, size, num_rows)
                self._landing.wait_copy(self._scorer.launch_scoring(nodes, staged, (), warps=warps))

    def warm_up_branches(self, shape: DraftTreeShape, *, general: bool) -> None:
        """Compile and capture the branches of one shape."""
        self._brancher.warm_up(shape, general=general)

    def start_look_ahead_pass(self, lives: Sequence[PendingProposal]) -> None:
        """Forget what was scored; these come next."""
        self._lives, self._scores = lives, ProposalScores(lives)
        self._placed.clear()
        self._parts.clear()
        self._held = 0
        self._branching = None

    def add_proposal(self, live: int, shape: DraftTreeShape) -> ProposalShape:
        """Place a proposal whose branches will have a shape; what of it will be scored."""
        placed = ProposalRange.of_tree(self._lives[live].tree)
        self._placed[live] = placed, shape
        return placed.nodes

    def has_room(self, count: int, nodes: ProposalShape) -> bool:
        """Whether the places of so many more proposals can be held."""
        return self._held + count * nodes.num_positions <= MAX_SCORED_NODES

    def launch_scoring(
        self,
        nodes: ProposalShape,
        staged: StagedRows,
        members: LaunchSessions,
        lives: Sequence[int],
    ) -> Tensor:
        """Begin to score proposals of one form, of these sessions' new rows; when what is returned
        has landed, `take` ends it."""
        placed = [self._placed[live][0] for live in lives]
        words = self._scorer.launch_scoring(
            nodes, staged, placed, first=self._held, warps=members.has_logits_processing
        )
        # While the device works.
        for live, each in zip(lives, placed, strict=True):
            self._scores.add_proposal(live, each, self._held)
            self._held += nodes.num_positions
        self._parts.append((members, lives))
        self._branching = self._collect()
        return words

    def read_scores(self, words: NDArray[np.int32]) -> None:
        """What came back of the newest launch."""
        for row, live in enumerate(self._parts[-1][1]):
            self._scores.store_int32s(live, self._placed[live][0], words[row])

    def store_scores(self, lives: Sequence[int], scored: OutcomeScores) -> None:
        """What another source found of these."""
        for live, tokens, logprobs in zip(lives, scored.tokens, scored.logprobs, strict=True):
            self._scores.store_scores(live, tokens, logprobs)

    def scored(self) -> OutcomeScores:
        """All that was scored since `begin`."""
        return self._scores.all_scores()

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """See `LookAheadProposer.draft_outcomes`."""
        if self._branching is not None and outcomes:
            yield from self._brancher.draft_outcomes(outcomes, self._branching)

    def _collect(self) -> ScoredSessions:
        """Where branches begin, of all parts so far."""
        order = [live for _, lives in self._parts for live in lives]
        members = self._parts[0][0]
        if len(self._parts) > 1:
            members = LaunchSessions.concatenate([part for part, _ in self._parts])
        rows = np.zeros(len(self._lives), dtype=np.int64)
        rows[order] = np.arange(len(order))
        placed = [self._placed[live] for live in order]
        return ScoredSessions.of_sessions(
            self._scores.held_rows(),
            rows,
            members,
            [shape for _, shape in placed],
            [each.nodes.is_chain for each, _ in placed],
        )
