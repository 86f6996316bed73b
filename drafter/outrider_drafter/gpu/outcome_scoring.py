"""Scores candidate tokens after every node of pending proposals on the GPU.

Proposals of one shape share a launch. A place is the root or a node of a proposal. The features of
the places are *held* on the device until the next scoring, because outcome drafts begin from them.
Letters in shapes: B proposals of a bucket; N nodes and P = 1 + N places of a bucket's proposals; n
nodes of one proposal; c candidates at each place; H feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import ProposalNodes
from outrider.engine.device.drafting.look_ahead_program import LookAheadProgram
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.transfer.buffers import DownloadBuffer, HostMirror
from outrider.engine.kernels.drafts.topk import MAX_TOPK
from outrider.spec.tree import ROOT
from outrider_drafter.gpu.batch import StagedRows
from outrider_drafter.gpu.grammar_masks import mask_candidates
from outrider_drafter.gpu.paged_kv import PagedDraftKV
from outrider_drafter.gpu.scoring_layout import NO_ROW, Indices, ProposalRange, ScoredRows
from outrider_drafter.gpu.shapes import ProposalShape, scoring_shapes
from outrider_drafter.proposers.interface import (
    OutcomeScores,
    PendingProposal,
    empty_candidates,
    node_digests,
)
from outrider_drafter.state.outcomes import NodeIndex

NUM_CANDIDATES: Final = MAX_TOPK
"""Number of candidates for the next token at the root and at each node of a proposal."""
NUM_SWEEPS: Final = 4
"""Number of sweeps of a scoring launch, that is of passes over the nodes of its proposals (see
`DraftForward.run_proposal`). A fifth sweep improves almost nothing. With only three sweeps, fewer
outcomes of trees are predicted (decision 22)."""
MAX_SCORED_NODES: Final = 2048
"""Maximum number of roots and nodes of scored proposals whose features are kept on the device.
Proposals for which there is no more memory are not scored."""


class ProposalBatch:
    """Static inputs of a scoring launch: the nodes of its proposals, filled from the host by one
    upload."""

    def __init__(self, device: torch.device) -> None:
        most = max(2 * nodes.batch_buckets[-1] * nodes.num_nodes for nodes, _ in scoring_shapes())
        self._mirror = HostMirror(1 + most, device)
        self.first = self._mirror.words[:1]
        """int32 [1]: row of `ProposalScorer.held` at which the features of the batch begin."""

    def stage_proposals(
        self, nodes: ProposalShape, placed: Sequence[ProposalRange], size: int, first: int
    ) -> None:
        """Fill the host buffer with the proposals `placed`, for a launch of `size` proposals of the
        shape `nodes`. `first`: row of `ProposalScorer.held` at which the features of the batch
        begin."""
        words = self._mirror.array
        words[0] = first
        tokens, parents = words[1 : _words(nodes, size)].reshape(2, size, nodes.num_nodes)
        tokens[:] = -1
        # The attention of a chain does not depend on `parents`: every node, present or not, is the
        # parent of the next one.
        parents[:] = np.arange(nodes.num_nodes) - 1 if nodes.is_chain else ROOT
        for row, each in enumerate(placed):
            each.write_row(row, tokens, parents)

    def upload(self, nodes: ProposalShape, size: int) -> ProposalNodes:
        """Upload the staged nodes and return them as device tensors. The call may be captured in a
        CUDA graph."""
        count = _words(nodes, size)
        self._mirror.upload_int32s(count)
        tokens, parents = self._mirror.words[1:count].view(2, size, nodes.num_nodes).unbind()
        return ProposalNodes(tokens, parents, nodes.is_chain)


def _words(nodes: ProposalShape, size: int) -> int:
    return 1 + 2 * size * nodes.num_nodes


class ProposalScorer:
    """Launches the scoring of pending proposals on the GPU and keeps the features of their roots
    and nodes there."""

    def __init__(
        self,
        program: LookAheadProgram,
        rows: PagedDraftKV,
        graphs: GraphCache,
        landing: DownloadBuffer,
        *,
        dtype: torch.dtype,
        sweeps: int,
    ) -> None:
        self._program, self._rows, self._graphs = program, rows, graphs
        self._landing, self._sweeps = landing, sweeps
        device = rows.tables.device
        self._given = ProposalBatch(device)
        # A launch also writes rows of padding after the rows of its proposals.
        most = MAX_SCORED_NODES + max(
            nodes.batch_buckets[-1] * nodes.num_positions for nodes, _ in scoring_shapes()
        )
        shape = (most, program.forward.feature_size)
        self.held = torch.zeros(shape, dtype=dtype, device=device)
        """[>= MAX_SCORED_NODES, H]: features of the roots and nodes that were scored last."""

    def launch_scoring(
        self,
        nodes: ProposalShape,
        staged: StagedRows,
        placed: Sequence[ProposalRange],
        *,
        first: int = 0,
        warps: bool,
    ) -> Tensor:
        """Launch the scoring of the proposals `placed`, which all have the shape `nodes`.

        `staged`: new KV rows of their sessions. `first`: row of `held` from which on their features
        are stored. `warps`: whether the launch supports logits processing. Returns int32 [B, P, 2,
        c] for B proposals with P places (root and nodes) and c candidates at each place: the
        candidate tokens and the bits of their float32 log-probs. A copy of the result to the host
        is started.
        """
        size, num_rows = staged.rows.tokens.shape
        self._given.stage_proposals(nodes, placed, size, first)
        warp = self._rows.warp.state if warps else None

        def run() -> Tensor:
            staged.upload()
            found = self._program.score_proposals(
                staged.rows,
                self._given.upload(nodes, size),
                state=self._rows.sampling,
                count=NUM_CANDIDATES,
                sweeps=self._sweeps,
                warp=warp,
            )
            self._hold(found.features.flatten(0, 1))
            words = torch.stack((found.tokens, found.logprobs.view(torch.int32)), dim=2)
            self._landing.start_copy(words)
            return words

        return self._graphs.run_graph(("score", nodes, size, num_rows, warps), run)

    def _hold(self, features: Tensor) -> None:
        if features.shape[1]:
            rows = self._given.first + torch.arange(len(features), device=features.device)
            self.held.index_copy_(0, rows, features)


class ProposalScores:
    """Scores of the pending proposals of a look-ahead pass. All are empty at first, and each is
    stored when its launch has ended."""

    def __init__(self, lives: Sequence[PendingProposal]) -> None:
        self._lives = lives
        self._tokens, self._logprobs = empty_candidates(lives, NUM_CANDIDATES)
        self._rows: list[Indices] = [np.full(1 + len(live.tree), NO_ROW) for live in lives]

    def add_proposal(self, live: int, placed: ProposalRange, first: int) -> None:
        """Record that proposal `live` was launched and that the features of its root and nodes are
        stored from row `first` of `ProposalScorer.held` on."""
        places = placed.node_rows
        self._rows[live] = np.where(places != NO_ROW, first + places, NO_ROW)

    def store_int32s(self, live: int, placed: ProposalRange, words: NDArray[np.int32]) -> None:
        """Store the downloaded output of proposal `live`, int32 [P, 2, c] for P places (root and
        nodes) with c candidates each: the candidate tokens and the bits of their float32
        log-probs."""
        there = (placed.node_rows != NO_ROW)[:, None]
        found = words[placed.node_rows]
        self._tokens[live] = np.where(there, found[:, 0], np.int32(-1))
        self._logprobs[live] = np.where(there, found[:, 1].view(np.float32), np.float32(-np.inf))

    def store_scores(
        self, live: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]
    ) -> None:
        """Store scores of proposal `live` that were computed by a proposer on the host. Candidates
        beyond the first NUM_CANDIDATES of a place are dropped. No features of this proposal are
        kept on the device."""
        width = min(tokens.shape[1], NUM_CANDIDATES)
        self._tokens[live][:, :width] = tokens[:, :width]
        self._logprobs[live][:, :width] = logprobs[:, :width]

    def all_scores(self) -> OutcomeScores:
        """Return the scores of all proposals, in order. Candidates of constrained sessions are
        restricted to what is allowed."""
        if any(live.session.has_constraint for live in self._lives):
            mask_candidates(self._lives, self._tokens, self._logprobs)
        places, prefixes = self._index
        return OutcomeScores(
            tokens=self._tokens, logprobs=self._logprobs, places=places, digests=prefixes
        )

    def held_rows(self) -> ScoredRows:
        """Return the index (`ScoredRows`) that finds the features of all scored roots and nodes on
        the device. This takes time on the host, so call it while the device works."""
        places, _ = self._index
        return ScoredRows(places, np.concatenate(self._rows))

    @cached_property
    def _index(self) -> tuple[NodeIndex, NDArray[np.uint64]]:
        """Fields `places` and `digests` of `OutcomeScores`, computed from the proposals' trees."""
        places = NodeIndex.of_trees([live.tree for live in self._lives])
        return places, node_digests(places, self._lives)
