"""What may follow at every place of live proposals: one launch for those that have one form.

B proposals of a bucket, N nodes, P = 1 + N places, c candidates a place, H feature width, n nodes
of one proposal. What the launches leave of the places' features is *held* on the device, for
branches to begin from, until proposals are scored again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.buffers import Uploader
from outrider.engine.device.draft_ahead import AheadProgram
from outrider.engine.device.draft_forward import GivenNodes, NewRows
from outrider.engine.device.graphs import GraphCache
from outrider.engine.kernels.drafts.topk import MAX_TOPK
from outrider.spec.tree import ROOT
from outrider_drafter.device_places import NOWHERE, Indices, Placed, ScoredPlaces
from outrider_drafter.device_rows import DeviceRows
from outrider_drafter.device_shapes import Nodes, score_family
from outrider_drafter.form_launches import mask_scores
from outrider_drafter.source import Live, Scored, no_scores

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
        self._uploads = Uploader(most, device)
        self._words = torch.zeros(most, dtype=torch.int32, device=device)
        self._buckets: dict[tuple[Nodes, int], tuple[Tensor, GivenNodes]] = {}
        """What is uploaded, and the nodes in it."""

    def fill(self, nodes: Nodes, placed: Sequence[Placed], size: int) -> GivenNodes:
        """Upload proposals in a bucket."""
        place = self._buckets.get((nodes, size))
        if place is None:
            place = self._buckets[nodes, size] = self._bucket(nodes, size)
        sent, given = place
        words = self._uploads.stage()[: sent.shape[0]]
        tokens, parents = words.reshape(2, size, nodes.num_nodes)
        tokens[:] = -1
        # What a chain sees is not looked up: its nodes stand one below the other, there or not.
        parents[:] = np.arange(nodes.num_nodes) - 1 if nodes.chain else ROOT
        for row, each in enumerate(placed):
            each.fill(row, tokens, parents)
        self._uploads.send(sent)
        return given

    def _bucket(self, nodes: Nodes, size: int) -> tuple[Tensor, GivenNodes]:
        shape = (2, size, nodes.num_nodes)
        sent = self._words[: math.prod(shape)]
        tokens, parents = sent.view(shape).unbind()
        return sent, GivenNodes(tokens, parents, nodes.chain)


class Scorer:
    """Launches the scoring of proposals and keeps what it left on the device."""

    def __init__(
        self,
        program: AheadProgram,
        rows: DeviceRows,
        graphs: GraphCache,
        *,
        dtype: torch.dtype,
        sweeps: int,
    ) -> None:
        self._program, self._rows, self._graphs = program, rows, graphs
        self._sweeps = sweeps
        device = rows.tables.device
        self._given = GivenBatch(device)
        shape = (MOST_PLACES, program.forward.feature_size)
        self.held = torch.zeros(shape, dtype=dtype, device=device)
        """[MOST_PLACES, H]: features of the places scored last."""

    def launch(
        self,
        nodes: Nodes,
        rows: NewRows,
        placed: Sequence[Placed],
        *,
        first: int = 0,
        warps: bool,
    ) -> Tensor:
        """Score proposals, whose places are held from row `first` on: int32 [B, P, 2, c],
        candidates and the bits of their log-probs. warps: whether sessions may warp their
        logits."""
        size, num_rows = rows.tokens.shape
        given = self._given.fill(nodes, placed, size)
        warp = self._rows.warp.state if warps else None

        def run() -> tuple[Tensor, Tensor]:
            found = self._program.score(
                rows,
                given,
                state=self._rows.sampling,
                count=CANDIDATES,
                sweeps=self._sweeps,
                warp=warp,
            )
            bits = found.logprobs.view(torch.int32)
            return torch.stack((found.tokens, bits), dim=2), found.features

        result, features = self._graphs.run(("score", nodes, size, num_rows, warps), run)
        kept = len(placed) * nodes.places
        self.held[first : first + kept].copy_(features.flatten(0, 1)[:kept])
        return result


class LiveScores:
    """The scores of live proposals as their launches come back; none at first."""

    def __init__(self, lives: Sequence[Live]) -> None:
        unknown = no_scores(lives, CANDIDATES)
        self._lives = lives
        self._tokens, self._logprobs = list(unknown.tokens), list(unknown.logprobs)
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
        return Scored(tokens=self._tokens, logprobs=self._logprobs)

    def places(self) -> ScoredPlaces:
        """Where their nodes are held."""
        trees = [live.tree for live in self._lives]
        return ScoredPlaces(list(zip(trees, self._rows, strict=True)))
