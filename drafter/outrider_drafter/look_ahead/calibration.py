"""Calibrates the probabilities of a proposal's outcomes from observed verdicts. Pure.

A draft model's own probabilities are biased, and differently so at every depth; they are only the
prior of the estimates. P places (root and nodes) of some proposals, m of these, c candidates a
place.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.spec.sampling import Rule
from outrider_drafter.state.outcomes import CandidateLayout, Floats, Indices, VerdictPath

_DEPTHS: Final = 4
"""Depths that are told apart; the last is for all beyond."""
_RANKS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24])
"""First rank of each bin."""
_PROBS: Final = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9])
"""Edges of the bins of a candidate's own probability."""
_BINS: Final = len(_PROBS) + 1
_CELLS: Final = _DEPTHS * len(_RANKS) * _BINS
_PRIOR: Final = 128.0
"""Observations that outweigh what the source says, and again that let a depth speak for itself."""
PRIOR_SHARPNESS: Final = {Rule.GREEDY: 1.3}
"""Where the sharpness begins, by rule; 1 elsewhere. Of the distribution that a head was trained to
tell, greedy decoding emits the best token every time."""
_SHARPNESSES: Final = (0.5, 3.0)
_FIRMNESS: Final = (30.0, 4096.0)
"""How firmly the first sharpness is believed, and at most any: squared nats of variance."""
_MEMORY: Final = 8192.0
"""Observations after which those of a cell count half."""
_TINY: Final = 1e-30
_REST: Final = 1e-6
"""Least probability of a token that is no candidate."""
_LEAST: Final = -60.0
"""Least log-prob of a candidate."""


class OutcomePredictor(Protocol):
    """What is known about the outcomes of one kind of session."""

    def expected_gains(self, layout: CandidateLayout, logprobs: NDArray[np.float32]) -> Floats:
        """[P, c]: the expected gain of a draft for each outcome; `logprobs` [P, c] of the
        candidates, -inf: there is none. A child's entry means nothing."""
        ...

    def learn_from_verdict(
        self, layout: CandidateLayout, logprobs: NDArray[np.float32], what: VerdictPath
    ) -> None:
        """A verdict showed what became of a proposal."""
        ...


class OutcomeCalibration:
    """Calibrated probabilities of outcomes, by depth, rank and the proposer's own probability.

    An outcome's probability is P(the path ends at a node) x P(a candidate follows there). Both are
    estimated from observed shares per cell of depth and probability, with the proposer's
    probability as prior. First all log-probs are scaled by one fitted factor, which needs far fewer
    observations than the cells do.
    """

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness
        """What log-probs are multiplied with; 1: the source is right."""
        self._firmness = _FIRMNESS[0]
        self._seen = np.zeros(_CELLS)
        self._hits = np.zeros(_CELLS)
        self._places = np.zeros(_DEPTHS)
        """By depth: places that were reached."""
        self._among = np.zeros(_DEPTHS)
        """By depth: reached places where a candidate was emitted."""
        self._lines = self._fitted()
        """By cell (a, b): the probability is a + b x the source's own."""

    def expected_gains(self, layout: CandidateLayout, logprobs: NDArray[np.float32]) -> Floats:
        """See `OutcomePredictor`."""
        probs = self.probs(layout.depths, logprobs)
        size = logprobs.shape[1]
        known = probs[layout.parent_indices, np.minimum(layout.ranks, size - 1)]
        # A node that is no candidate has at most what these leave.
        rest = np.maximum(1.0 - probs.sum(axis=1), 0.0)
        stands = np.where(layout.ranks < size, known, rest[layout.parent_indices])
        found: Floats = layout.reach_probability(stands)[:, None] * probs
        return found

    def learn_from_verdict(
        self, layout: CandidateLayout, logprobs: NDArray[np.float32], what: VerdictPath
    ) -> None:
        """See `OutcomePredictor`."""
        reached = logprobs[what.places]
        self.observe(layout.depths[what.places], reached, what.columns)

    def probs(self, depths: Indices, logprobs: NDArray[np.float32]) -> Floats:
        """float64 [m, c], at most 1 a row: how probable each candidate is once its place was
        reached; depths [m]. A candidate of log-prob -inf has none."""
        offsets, slopes = self._lines
        own = self._sharpened(_with_rest(logprobs))[:, :-1]
        cells = _cells(depths, own)
        found = own * slopes[cells]
        found += offsets[cells]
        found[logprobs == -np.inf] = 0.0
        at = np.minimum(depths, _DEPTHS - 1)
        among = own.sum(axis=1) * _PRIOR + self._among[at]
        among /= self._places[at] + _PRIOR
        # A row of shares does not add up by itself.
        sums = np.maximum(found.sum(axis=1), _TINY)
        found *= (np.minimum(among, 1.0) / sums)[:, None]
        return found

    def observe(self, depths: Indices, logprobs: NDArray[np.float32], columns: Indices) -> None:
        """Record which candidate was emitted at each place. `depths` [m]; `columns` [m]: index of
        the emitted candidate, -1 if none. Places without candidates are ignored."""
        looked = (logprobs > -np.inf).any(axis=1)
        depths, logprobs, columns = depths[looked], logprobs[looked], columns[looked]
        told = _with_rest(logprobs)
        distribution = self._sharpened(told)
        cells = _cells(depths, distribution[:, :-1])
        self._seen += np.bincount(cells[logprobs > -np.inf], minlength=_CELLS)
        hit = columns >= 0
        self._hits += np.bincount(cells[hit, columns[hit]], minlength=_CELLS)
        at = np.minimum(depths, _DEPTHS - 1)
        self._places += np.bincount(at, minlength=_DEPTHS)
        self._among += np.bincount(at[hit], minlength=_DEPTHS)
        self._sharpen(told, distribution, columns)
        old = self._seen > _MEMORY
        self._seen[old] *= 0.5
        self._hits[old] *= 0.5
        old = self._places > _MEMORY
        self._places[old] *= 0.5
        self._among[old] *= 0.5
        # Now, not when a pass needs them: nobody waits for what is learnt.
        self._lines = self._fitted()

    def _sharpened(self, told: Floats) -> Floats:
        """[m, 1 + c]: the distribution of what `_with_rest` gave."""
        distribution = np.exp(told * self.sharpness)
        distribution /= distribution.sum(axis=1, keepdims=True)
        return distribution

    def _sharpen(self, told: Floats, distribution: Floats, columns: Indices) -> None:
        """One step of Newton's on the log-loss, with all the curvature there was so far."""
        # The rest is the last column, where -1 leads.
        emitted = told[np.arange(len(told)), columns]
        mean = (distribution * told).sum(axis=1)
        variance = (distribution * told * told).sum(axis=1) - mean * mean
        least, most = _SHARPNESSES
        self._firmness = min(self._firmness + float(variance.sum()), _FIRMNESS[1])
        sharpness = self.sharpness + float((emitted - mean).sum()) / self._firmness
        self.sharpness = min(max(sharpness, least), most)

    def _fitted(self) -> tuple[Floats, Floats]:
        seen = self._seen.reshape(_DEPTHS, -1)
        hits = self._hits.reshape(_DEPTHS, -1)
        weight = 1.0 / (seen.sum(axis=0) + _PRIOR)
        own = 1.0 / (seen + _PRIOR)
        offsets = own * (hits + _PRIOR * weight * hits.sum(axis=0))
        slopes = own * _PRIOR * weight * _PRIOR
        return offsets.ravel(), slopes.ravel()


def _with_rest(logprobs: NDArray[np.float32]) -> Floats:
    """[m, c + 1]: the log-probs of candidates, and of all tokens that are none of them together;
    those that are nothing to speak of, or none, all alike."""
    told = np.empty((len(logprobs), logprobs.shape[1] + 1))
    told[:, :-1] = logprobs
    told[:, -1] = np.log(np.maximum(1.0 - np.exp(told[:, :-1]).sum(axis=1), _REST))
    found: Floats = np.maximum(told, _LEAST)
    return found


def _cells(depths: Indices, own: Floats) -> Indices:
    """[m, c], by the candidates' own probabilities."""
    at = np.minimum(depths, _DEPTHS - 1)[:, None] * len(_RANKS) + _rank_bins(own.shape[1])
    cells: Indices = at * _BINS + np.searchsorted(_PROBS, own)
    return cells


@cache
def _rank_bins(width: int) -> Indices:
    bins: Indices = np.searchsorted(_RANKS, np.arange(width), side="right") - 1
    return bins


_FIRST_DRAWN: Final = 0.62
"""Assumed share of a place's first child among its children; later ones get what is left."""
_SPREAD_DEPTHS: Final = 16
_SPREAD_RANKS: Final = 64
_SPREAD_PRIOR: Final = 8.0


class RankCalibration:
    """Expected gains under the rejection rule, learned by depth and rank.

    Siblings are ordered as they were drawn. Candidates are ranked by probability among the tokens
    that were not drawn. The probabilities of drawn tokens are not used.
    """

    def __init__(self) -> None:
        self._reached = np.zeros(_SPREAD_DEPTHS)
        """By depth: places with children that were reached."""
        self._stood = np.zeros(_SPREAD_DEPTHS)
        """By depth: places with children below which the path went on."""
        ranks = np.arange(1, _SPREAD_RANKS + 1, dtype=np.float64) ** -1.5
        self._ranks = np.tile(_SPREAD_PRIOR * ranks / ranks.sum(), (2, 1))
        """[resampled, bonus][rank]: how often a token of this rank followed."""

    def expected_gains(self, layout: CandidateLayout, logprobs: NDArray[np.float32]) -> Floats:
        """See `OutcomePredictor`."""
        goes_on = (self._stood + 0.6 * _SPREAD_PRIOR) / (self._reached + _SPREAD_PRIOR)
        here = goes_on[np.minimum(layout.depths, _SPREAD_DEPTHS - 1)]
        inner = _inner(layout)
        reach = layout.reach_probability(here[layout.parent_indices] * _shares(layout))
        ends = reach * np.where(inner, 1.0 - here, 1.0)
        chances = self._ranks / self._ranks.sum(axis=1, keepdims=True)
        found: Floats = ends[:, None] * chances[np.where(inner, 0, 1)[:, None], _left(layout)]
        found[logprobs == -np.inf] = 0.0
        return found

    def learn_from_verdict(
        self, layout: CandidateLayout, logprobs: NDArray[np.float32], what: VerdictPath
    ) -> None:
        """See `OutcomePredictor`."""
        left, inner = _left(layout), _inner(layout)
        for place, column, stood in zip(
            what.places.tolist(), what.columns.tolist(), what.accepted.tolist(), strict=True
        ):
            depth = min(int(layout.depths[place]), _SPREAD_DEPTHS - 1)
            if inner[place]:
                self._reached[depth] += 1.0
                self._stood[depth] += stood
            if not stood and column >= 0:
                self._ranks[0 if inner[place] else 1, left[place, column]] += 1.0


def _inner(layout: CandidateLayout) -> NDArray[np.bool_]:
    """[P]: places that have children."""
    inner = np.zeros(len(layout.parent_indices), dtype=np.bool_)
    inner[layout.parent_indices[layout.depths > 0]] = True
    return inner


def _left(layout: CandidateLayout) -> Indices:
    """[P, c]: rank of each candidate among those of its place that are no children."""
    ranks = np.cumsum(~layout.is_child, axis=1) - 1
    found: Indices = np.clip(ranks, 0, _SPREAD_RANKS - 1)
    return found


def _shares(layout: CandidateLayout) -> Floats:
    """[P]: each node's assumed share among its siblings, which are in the order of drawing."""
    weights = np.zeros(len(layout.parent_indices))
    left: dict[int, float] = {}
    for place, above in enumerate(layout.parent_indices.tolist()):
        if above != place:
            rest = left.get(above, 1.0)
            weights[place] = _FIRST_DRAWN * rest
            left[above] = rest - _FIRST_DRAWN * rest
    totals = np.bincount(layout.parent_indices, weights=weights, minlength=len(weights))
    shares: Floats = weights / np.maximum(totals[layout.parent_indices], _TINY)
    return shares
