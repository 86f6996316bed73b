"""How probable the outcomes of a proposal are, learnt from what verdicts showed (pure).

A draft model is wrong about itself, and differently so at every depth; what it says is where the
estimates begin. m places, c candidates a place.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider_drafter.outcomes import Floats, Indices, Layout, Seen

_DEPTHS: Final = 4
"""Depths that are told apart; the last is for all beyond."""
_RANKS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24])
"""First rank of each bin."""
_LOGPROBS: Final = np.log(np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9]))
"""Edges of the bins of a candidate's own log-prob."""
_BINS: Final = len(_LOGPROBS) + 1
_CELLS: Final = _DEPTHS * len(_RANKS) * _BINS
_PRIOR: Final = 8.0
"""Observations that outweigh what the source says, and again that let a depth speak for itself."""
_MEMORY: Final = 8192.0
"""Observations after which those of a cell count half."""


class Predictor(Protocol):
    """What is known about the outcomes of one kind of session."""

    def gains(self, layout: Layout, logprobs: NDArray[np.float32]) -> Floats:
        """[1 + n, c]: the expected gain of a draft for each outcome of a proposal; `logprobs`
        [1 + n, c] of its candidates, -inf: there is none. A child's entry means nothing."""
        ...

    def learn(self, layout: Layout, logprobs: NDArray[np.float32], what: Seen) -> None:
        """A verdict showed what became of a proposal."""
        ...


class Calibration:
    """P(the path ends at a place) x P(a candidate follows there), by depth, rank and the source's
    own probability: shares of what was seen, that start from that probability."""

    def __init__(self) -> None:
        self._seen = np.zeros(_CELLS)
        self._hits = np.zeros(_CELLS)
        self._lines: tuple[Floats, Floats] | None = None
        """By cell (a, b): the probability is a + b x the source's own."""

    def gains(self, layout: Layout, logprobs: NDArray[np.float32]) -> Floats:
        """See `Predictor`."""
        probs = self.probs(layout.depths, logprobs)
        above, size = layout.tree.parents + 1, logprobs.shape[1]
        known = probs[above, np.minimum(layout.ranks, size - 1)]
        # A node that is no candidate has at most what these leave.
        rest = 1.0 - probs.sum(axis=1)
        stands = np.where(layout.ranks < size, known, rest[above])
        found: Floats = layout.reach(stands)[:, None] * probs
        return found

    def learn(self, layout: Layout, logprobs: NDArray[np.float32], what: Seen) -> None:
        """See `Predictor`."""
        reached = logprobs[what.places]
        self.observe(layout.depths[what.places], reached, what.columns)

    def probs(self, depths: Indices, logprobs: NDArray[np.float32]) -> Floats:
        """float64 [m, c], at most 1 a row: how probable each candidate is once its place was
        reached; depths [m]. A candidate of log-prob -inf has none."""
        offsets, slopes = self._fitted()
        cells = _cells(depths, logprobs)
        found = np.exp(logprobs, dtype=np.float64)
        found *= slopes[cells]
        found += offsets[cells]
        found[logprobs == -np.inf] = 0.0
        found /= np.maximum(found.sum(axis=1, keepdims=True), 1.0)
        return found

    def observe(self, depths: Indices, logprobs: NDArray[np.float32], columns: Indices) -> None:
        """At places of these depths [m] candidate columns[i] was emitted; -1: none of them."""
        cells = _cells(depths, logprobs)
        self._seen += np.bincount(cells[logprobs > -np.inf], minlength=_CELLS)
        hit = columns >= 0
        self._hits += np.bincount(cells[hit, columns[hit]], minlength=_CELLS)
        old = self._seen > _MEMORY
        self._seen[old] *= 0.5
        self._hits[old] *= 0.5
        self._lines = None

    def _fitted(self) -> tuple[Floats, Floats]:
        if self._lines is None:
            seen = self._seen.reshape(_DEPTHS, -1)
            hits = self._hits.reshape(_DEPTHS, -1)
            weight = 1.0 / (seen.sum(axis=0) + _PRIOR)
            own = 1.0 / (seen + _PRIOR)
            offsets = own * (hits + _PRIOR * weight * hits.sum(axis=0))
            slopes = own * _PRIOR * weight * _PRIOR
            self._lines = offsets.ravel(), slopes.ravel()
        return self._lines


def _cells(depths: Indices, logprobs: NDArray[np.float32]) -> Indices:
    """[m, c]"""
    ranks = np.searchsorted(_RANKS, np.arange(logprobs.shape[1]), side="right") - 1
    at = np.minimum(depths, _DEPTHS - 1)[:, None] * len(_RANKS) + ranks
    cells: Indices = at * _BINS + np.searchsorted(_LOGPROBS, logprobs)
    return cells


_FIRST_DRAWN: Final = 0.62
"""Assumed share of a place's first child among its children; later ones get what is left."""
_SPREAD_DEPTHS: Final = 16
_SPREAD_RANKS: Final = 64
_SPREAD_PRIOR: Final = 8.0


class FixedSpread:
    """Of the rejection rule: gains by depth and rank alone, as earlier verdicts taught them.

    A node's place among its siblings is that in which it was drawn, and a candidate's rank is that
    in the law of its place, drawn children left out: no probability of a drawn token matters.
    """

    def __init__(self) -> None:
        self._reached = np.zeros(_SPREAD_DEPTHS)
        """By depth: places with children that were reached,"""
        self._stood = np.zeros(_SPREAD_DEPTHS)
        """and those of them below which the path went on."""
        ranks = np.arange(1, _SPREAD_RANKS + 1, dtype=np.float64) ** -1.5
        self._ranks = np.tile(_SPREAD_PRIOR * ranks / ranks.sum(), (2, 1))
        """[resampled, bonus][rank]: how often a token of this rank followed."""

    def gains(self, layout: Layout, logprobs: NDArray[np.float32]) -> Floats:
        """See `Predictor`."""
        goes_on = (self._stood + 0.6 * _SPREAD_PRIOR) / (self._reached + _SPREAD_PRIOR)
        here = goes_on[np.minimum(layout.depths, _SPREAD_DEPTHS - 1)]
        above = layout.tree.parents + 1
        inner = np.zeros(len(layout.depths), dtype=np.bool_)
        inner[above] = True
        reach = layout.reach(here[above] * _shares(above))
        ends = reach * np.where(inner, 1.0 - here, 1.0)
        chances = self._ranks / self._ranks.sum(axis=1, keepdims=True)
        found: Floats = ends[:, None] * chances[np.where(inner, 0, 1)[:, None], _left(layout)]
        found[logprobs == -np.inf] = 0.0
        return found

    def learn(self, layout: Layout, logprobs: NDArray[np.float32], what: Seen) -> None:
        """See `Predictor`."""
        left = _left(layout)
        inner = set((layout.tree.parents + 1).tolist())
        for place, column, stood in zip(
            what.places.tolist(), what.columns.tolist(), what.stood.tolist(), strict=True
        ):
            depth = min(int(layout.depths[place]), _SPREAD_DEPTHS - 1)
            if place in inner:
                self._reached[depth] += 1.0
                self._stood[depth] += stood
            if not stood and column >= 0:
                self._ranks[0 if place in inner else 1, left[place, column]] += 1.0


def _left(layout: Layout) -> Indices:
    """[1 + n, c]: rank of each candidate among those of its place that are no children."""
    ranks = np.cumsum(~layout.is_child, axis=1) - 1
    found: Indices = np.clip(ranks, 0, _SPREAD_RANKS - 1)
    return found


def _shares(above: NDArray[np.int32]) -> Floats:
    """[n]: each node's assumed share among its siblings, which are in the order of drawing."""
    drawn = np.zeros(len(above), dtype=np.int64)
    children: dict[int, int] = {}
    for node, place in enumerate(above.tolist()):
        drawn[node] = children.get(place, 0)
        children[place] = int(drawn[node]) + 1
    weights = _FIRST_DRAWN * (1.0 - _FIRST_DRAWN) ** drawn
    totals = np.bincount(above, weights=weights, minlength=int(above.max(initial=0)) + 1)
    shares: Floats = weights / totals[above]
    return shares
