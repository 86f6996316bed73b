"""What may follow at every place of live proposals: one launch for those that have one form.

B proposals of a bucket, N nodes, P = 1 + N places, c candidates a place, H feature width, n nodes
of one proposal. What the launches leave of the places' features is *held* on the device, for
branches to begin from, until proposals are scored again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.draft_forward import GivenNodes
from outrider.engine.device.drafting.look_ahead_program import AheadProgram
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.transfer.buffers import Landing, Mirror
from outrider.engine.kernels.drafts.topk import MAX_TOPK
from outrider.spec.tree import ROOT
from outrider_drafter.gpu.batch import StagedRows
from outrider_drafter.gpu.grammar_masks import mask_scores
from outrider_drafter.gpu.paged_kv import DeviceRows
from outrider_drafter.gpu.scoring_layout import NOWHERE, HeldPlaces, Indices, Placed
from outrider_drafter.gpu.shapes import Nodes, score_family
from outrider_drafter.proposers.interface import Live, Scored, digests, no_candidates
from outrider_drafter.state.outcomes import Places

CANDIDATES: Final = MAX_TOPK
"""c."""
SWEEPS: Final = 4
"""How often the nodes of a proposal are run (`HeadForward.given`): a fifth sweep adds next to
nothing, and without the fourth outcomes of trees are foreseen less often (decision 22)."""
MOST_PLACES: Final = 2048
"""Places that are held at once; proposals that find no room are not scored."""


class GivenBatch:
    """Static inputs of proposals' nodes, filled from the host by one upload."""

    def __init__(self, device: torch.device) -> None:
        most = max(2 * nodes.sizes[-1] * nodes.num_nodes for nodes, _ in score_family())
        self._mirror = Mirror(1 + most, device)
        self.first = self._mirror.words[:1]
        """int32 [1]: where the places of the proposals are held from."""

    def fill(self, nodes: Nodes, placed: Sequence[Placed], size: int, first: int) -> None:
        """Stage proposals in a bucket."""
        words = self._mirror.array
        words[0] = first
        tokens, parents = words[1 : _words(nodes, size)].reshape(2, size, nodes.num_nodes)
        tokens[:] = -1
        # What a chain sees is not looked up: its nodes stand one below the other, there or not.
        parents[:] = np.arange(nodes.num_nodes) - 1 if nodes.chain else ROOT
        for row, each in enumerate(placed):
            each.fill(row, tokens, parents)

    def upload(self, nodes: Nodes, size: int) -> GivenNodes:
        """What was staged, on its way to the device; may be part of a graph."""
        count = _words(nodes, size)
        self._mirror.upload(count)
        tokens, parents = self._mirror.words[1:count].view(2, size, nodes.num_nodes).unbind()
        return GivenNodes(tokens, parents, nodes.chain)


def _words(nodes: Nodes, size: int) -> int:
    return 1 + 2 * size * nodes.num_nodes


class Scorer:
    """Launches the scoring of proposals and keeps what it left on the device."""

    def __init__(
        self,
        program: AheadProgram,
        rows: DeviceRows,
        graphs: GraphCache,
        landing: Landing,
        *,
        dtype: torch.dtype,
        sweeps: int,
    ) -> None:
        self._program, self._rows, self._graphs = program, rows, graphs
        self._landing, self._sweeps = landing, sweeps
        device = rows.tables.device
        self._given = GivenBatch(device)
        # A launch leaves rows of its padding behind those of its proposals.
        most = MOST_PLACES + max(nodes.sizes[-1] * nodes.places for nodes, _ in score_family())
        shape = (most, program.forward.feature_size)
        self.held = torch.zeros(shape, dtype=dtype, device=device)
        """[>= MOST_PLACES, H]: features of the places scored last."""

    def launch(
        self,
        nodes: Nodes,
        staged: StagedRows,
        placed: Sequence[Placed],
        *,
        first: int = 0,
        warps: bool,
    ) -> Tensor:
        """Score proposals, whose places are held from row `first` on: int32 [B, P, 2, c],
        candidates and the bits of their log-probs, which land. Launches that hold more come later.
        warps: whether sessions may warp their logits."""
        size, num_rows = staged.rows.tokens.shape
        self._given.fill(nodes, placed, size, first)
        warp = self._rows.warp.state if warps else None

        def run() -> Tensor:
            staged.upload()
            found = self._program.score(
                staged.rows,
                self._given.upload(nodes, size),
                state=self._rows.sampling,
                count=CANDIDATES,
                sweeps=self._sweeps,
                warp=warp,
            )
            self._hold(found.features.flatten(0, 1))
            words = torch.stack((found.tokens, found.logprobs.view(torch.int32)), dim=2)
            self._landing.put(words)
            return words

        return self._graphs.run(("score", nodes, size, num_rows, warps), run)

    def _hold(self, features: Tensor) -> None:
        if features.shape[1]:
            rows = self._given.first + torch.arange(len(features), device=features.device)
            self.held.index_copy_(0, rows, features)


class LiveScores:
    """The scores of live proposals as their launches come back; none at first."""

    def __init__(self, lives: Sequence[Live]) -> None:
        self._lives = lives
        self._tokens, self._logprobs = no_candidates(lives, CANDIDATES)
        self._rows: list[Indices] = [np.full(1 + len(live.tree), NOWHERE) for live in lives]

    def place(self, live: int, placed: Placed, first: int) -> None:
        """One proposal was launched; its places are held from `first` on."""
        places = placed.places
        self._rows[live] = np.where(places != NOWHERE, first + places, NOWHERE)

    def put(self, live: int, placed: Placed, words: NDArray[np.int32]) -> None:
        """What came back of it, int32 [P, 2, c]."""
        there = (placed.places != NOWHERE)[:, None]
        found = words[placed.places]
        self._tokens[live] = np.where(there, found[:, 0], np.int32(-1))
        self._logprobs[live] = np.where(there, found[:, 1].view(np.float32), np.float32(-np.inf))

    def adopt(self, live: int, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """What another source found of one proposal, [1 + n, any]; nothing of it is held."""
        width = min(tokens.shape[1], CANDIDATES)
        self._tokens[live][:, :width] = tokens[:, :width]
        self._logprobs[live][:, :width] = logprobs[:, :width]

    def scored(self) -> Scored:
        """All of them, in the order of the proposals; of sessions in a grammar, what is legal."""
        if any(live.session.constrained for live in self._lives):
            mask_scores(self._lives, self._tokens, self._logprobs)
        places, prefixes = self._known
        return Scored(tokens=self._tokens, logprobs=self._logprobs, places=places, digests=prefixes)

    def held(self) -> HeldPlaces:
        """Where their nodes are held; to be called while the device works, for it takes time."""
        places, _ = self._known
        return HeldPlaces(places, np.concatenate(self._rows))

    @cached_property
    def _known(self) -> tuple[Places, NDArray[np.uint64]]:
        """What their trees alone say: `places` and `digests` of `Scored`."""
        places = Places.of([live.tree for live in self._lives])
        return places, digests(places, self._lives)
