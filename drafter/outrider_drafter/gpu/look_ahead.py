"""Look-ahead on the GPU: scores pending proposals, then drafts for their outcomes.

Scores stay valid until the next scoring. Drafts for outcomes read the KV of their sessions'
accepted tokens, which they never change, and the features of the scored places (roots and nodes),
which are kept on the device.
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
    """Scores pending proposals on the GPU and drafts for their outcomes. It keeps the scores of the
    last look-ahead pass."""

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
        """Create an instance without scores. `rows` must have `SCRATCH_BLOCKS` scratch blocks.
        `max_context`, `bounded` and `sweeps`: see `GpuProposer`. `path_rows`: see `Buckets`."""
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
        """Proposals to be scored, each with the shape of the drafts for its outcomes, by index of
        the proposal."""
        self._parts: list[tuple[LaunchSessions, Sequence[int]]] = []
        """Launched sessions, each group with the indices of its proposals."""
        self._held = 0
        """Number of places whose features are kept on the device."""
        self._branching: ScoredSessions | None = None
        """Scored sessions from which outcome drafts begin; None if nothing was scored."""

    def warm_up_scores(
        self, nodes: ProposalShape, batch: DraftBatch, row_buckets: Sequence[int], *, warps: bool
    ) -> None:
        """Compile and capture the graphs that score proposals of the shape `nodes`, one for each
        batch size and each number of catch-up rows in `row_buckets`. `warps`: whether the graphs
        process logits."""
        for size in nodes.batch_buckets:
            for num_rows in row_buckets:
                staged = batch.stage_rows(None, size, num_rows)
                self._landing.wait_copy(self._scorer.launch_scoring(nodes, staged, (), warps=warps))

    def warm_up_branches(self, shape: DraftTreeShape, *, general: bool) -> None:
        """Compile and capture the graphs of outcome drafts with the given shape. `general`: whether
        the graphs support logits processing, grammar masks and trees drawn with the target's random
        numbers."""
        self._brancher.warm_up(shape, general=general)

    def start_look_ahead_pass(self, lives: Sequence[PendingProposal]) -> None:
        """Discard all scores and start a pass over these proposals."""
        self._lives, self._scores = lives, ProposalScores(lives)
        self._placed.clear()
        self._parts.clear()
        self._held = 0
        self._branching = None

    def add_proposal(self, live: int, shape: DraftTreeShape) -> ProposalShape:
        """Add a proposal to the look-ahead pass that `start_look_ahead_pass` began. `live` is its
        index in the list that was passed to that function. `shape` is the shape of the drafts that
        the pass makes for the proposal's outcomes, which are combinations of accepted path and next
        token. Return the shape in which the proposal itself is scored, to estimate the
        probabilities of its outcomes."""
        placed = ProposalRange.of_tree(self._lives[live].tree)
        self._placed[live] = placed, shape
        return placed.nodes

    def has_room(self, count: int, nodes: ProposalShape) -> bool:
        """Return whether there is memory for the features of `count` more proposals of the shape
        `nodes`."""
        return self._held + count * nodes.num_positions <= MAX_SCORED_NODES

    def launch_scoring(
        self,
        nodes: ProposalShape,
        staged: StagedRows,
        members: LaunchSessions,
        lives: Sequence[int],
    ) -> Tensor:
        """Launch the scoring of the proposals with the indices `lives`, which all have the shape
        `nodes`. The launch also computes the new rows of their sessions, which are in `staged`.
        Return the output on the device, which must be downloaded and passed to `read_scores`."""
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
        """Store the scores in `words`, the downloaded output of the newest call of
        `launch_scoring`."""
        for row, live in enumerate(self._parts[-1][1]):
            self._scores.store_int32s(live, self._placed[live][0], words[row])

    def store_scores(self, lives: Sequence[int], scored: OutcomeScores) -> None:
        """Store scores that were computed by a proposer on the host. `lives`: indices of the
        proposals in `scored`."""
        for live, tokens, logprobs in zip(lives, scored.tokens, scored.logprobs, strict=True):
            self._scores.store_scores(live, tokens, logprobs)

    def scored(self) -> OutcomeScores:
        """Return the scores of all proposals of the current look-ahead pass."""
        return self._scores.all_scores()

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """See `LookAheadProposer.draft_outcomes`."""
        if self._branching is not None and outcomes:
            yield from self._brancher.draft_outcomes(outcomes, self._branching)

    def _collect(self) -> ScoredSessions:
        """Return the sessions of all launches so far, from which outcome drafts begin."""
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
