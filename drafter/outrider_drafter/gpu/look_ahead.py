"""Look-ahead on a device: proposals are scored, then drafted for where they may end.

What is scored stays until the next time: branches need their sessions' real rows, which look-ahead
never writes, and the places' features, which are held beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.device.drafting.look_ahead_program import AheadProgram
from outrider.engine.device.graphs.graph_cache import GraphCache
from outrider.engine.device.transfer.buffers import Landing
from outrider_drafter.gpu.batch import DraftBatch, Members, StagedRows
from outrider_drafter.gpu.draft_launcher import Grower
from outrider_drafter.gpu.outcome_drafting import Brancher, Branching
from outrider_drafter.gpu.outcome_scoring import MOST_PLACES, LiveScores, Scorer
from outrider_drafter.gpu.paged_kv import DeviceRows
from outrider_drafter.gpu.scoring_layout import Placed
from outrider_drafter.gpu.shapes import Nodes, Shape
from outrider_drafter.proposers.interface import Branches, Live, Outcome, Scored


class DeviceLookAhead:
    """What was scored last, and the drafts that begin there."""

    def __init__(
        self,
        program: AheadProgram,
        rows: DeviceRows,
        grower: Grower,
        graphs: GraphCache,
        landing: Landing,
        *,
        dtype: torch.dtype,
        max_context: int,
        bounded: bool,
        sweeps: int,
        path_rows: tuple[int, ...],
    ) -> None:
        """`rows` with SCRATCH_BLOCKS; `max_context`, `bounded`, `sweeps`: as in the source;
        `path_rows`: see `Buckets`."""
        self._landing = landing
        self._scorer = Scorer(program, rows, graphs, landing, dtype=dtype, sweeps=sweeps)
        self._brancher = Brancher(
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
        self._lives: Sequence[Live] = ()
        self._scores = LiveScores(())
        self._placed: dict[int, tuple[Placed, Shape]] = {}
        """By live proposal, those that are to be scored."""
        self._parts: list[tuple[Members, Sequence[int]]] = []
        """What was launched, with the live proposals of the sessions."""
        self._held = 0
        """Rows of held places."""
        self._branching: Branching | None = None
        """Where branches begin; None if nothing was scored."""

    def warm_up_scores(
        self, nodes: Nodes, batch: DraftBatch, row_buckets: Sequence[int], *, warps: bool
    ) -> None:
        """Compile and capture the scoring of one form, with catch-ups of so many rows."""
        for size in nodes.sizes:
            for num_rows in row_buckets:
                staged = batch.fill(None, size, num_rows)
                self._landing.wait(self._scorer.launch(nodes, staged, (), warps=warps))

    def warm_up_branches(self, shape: Shape, *, general: bool) -> None:
        """Compile and capture the branches of one shape."""
        self._brancher.warm_up(shape, general=general)

    def begin(self, lives: Sequence[Live]) -> None:
        """Forget what was scored; these come next."""
        self._lives, self._scores = lives, LiveScores(lives)
        self._placed.clear()
        self._parts.clear()
        self._held = 0
        self._branching = None

    def add(self, live: int, shape: Shape) -> Nodes:
        """Place a proposal whose branches will have a shape; what of it will be scored."""
        placed = Placed.of(self._lives[live].tree)
        self._placed[live] = placed, shape
        return placed.nodes

    def has_room(self, count: int, nodes: Nodes) -> bool:
        """Whether the places of so many more proposals can be held."""
        return self._held + count * nodes.places <= MOST_PLACES

    def launch(
        self, nodes: Nodes, staged: StagedRows, members: Members, lives: Sequence[int]
    ) -> Tensor:
        """Begin to score proposals of one form, of these sessions' new rows; when what is returned
        has landed, `take` ends it."""
        placed = [self._placed[live][0] for live in lives]
        words = self._scorer.launch(nodes, staged, placed, first=self._held, warps=members.warps)
        # While the device works.
        for live, each in zip(lives, placed, strict=True):
            self._scores.place(live, each, self._held)
            self._held += nodes.places
        self._parts.append((members, lives))
        self._branching = self._collect()
        return words

    def take(self, words: NDArray[np.int32]) -> None:
        """What came back of the newest launch."""
        for row, live in enumerate(self._parts[-1][1]):
            self._scores.put(live, self._placed[live][0], words[row])

    def adopt(self, lives: Sequence[int], scored: Scored) -> None:
        """What another source found of these."""
        for live, tokens, logprobs in zip(lives, scored.tokens, scored.logprobs, strict=True):
            self._scores.adopt(live, tokens, logprobs)

    def scored(self) -> Scored:
        """All that was scored since `begin`."""
        return self._scores.scored()

    def branch(self, outcomes: Sequence[Outcome]) -> Iterator[Branches]:
        """See `AheadSource.branch`."""
        if self._branching is not None and outcomes:
            yield from self._brancher.branch(outcomes, self._branching)

    def _collect(self) -> Branching:
        """Where branches begin, of all parts so far."""
        order = [live for _, lives in self._parts for live in lives]
        members = self._parts[0][0]
        if len(self._parts) > 1:
            members = Members.joined([part for part, _ in self._parts])
        rows = np.zeros(len(self._lives), dtype=np.int64)
        rows[order] = np.arange(len(order))
        placed = [self._placed[live] for live in order]
        return Branching.of(
            self._scores.held(),
            rows,
            members,
            [shape for _, shape in placed],
            [each.nodes.chain for each, _ in placed],
        )
