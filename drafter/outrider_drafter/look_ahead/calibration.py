"""Calibrates the probabilities of a proposal's outcomes from observed verdicts.

A draft model's own probabilities are biased, by a different amount at every depth. They serve as
the prior of the estimates. Letters in shapes: P places (roots and nodes) of several proposals; m
some of these places; c candidate tokens at each place.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.spec.sampling import Rule
from outrider_drafter.state.outcomes import CandidateLayout, Floats, Indices, VerdictPath

_DEPTHS: Final = 4
"""Number of depths with statistics of their own; the last one includes all greater depths."""
_RANKS: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24])
"""First rank of each bin of ranks."""
_PROBS: Final = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.9])
"""Edges of the bins of the draft model's probability of a candidate."""
_BINS: Final = len(_PROBS) + 1
_CELLS: Final = _DEPTHS * len(_RANKS) * _BINS
_PRIOR: Final = 128.0
"""Weight of a prior, as a number of observations. It is used twice: for the draft model's
probability, and for the mean over all depths as the prior of one depth."""
PRIOR_SHARPNESS: Final = {Rule.GREEDY: 1.3}
"""Initial value of `OutcomeCalibration.sharpness` for each acceptance rule; 1 for rules that are
not listed. Greedy decoding always emits the most likely token of the distribution that an EAGLE
head was trained to predict, so its sharpness starts higher."""
_SHARPNESSES: Final = (0.5, 3.0)
_FIRMNESS: Final = (30.0, 4096.0)
"""Initial and maximum confidence in the sharpness, as a sum of variances of log-probs (squared
nats)."""
_MEMORY: Final = 8192.0
"""Number of observations after which the counts of a cell are halved."""
_TINY: Final = 1e-30
_REST: Final = 1e-6
"""Minimum probability of all tokens that are not candidates together."""
_LEAST: Final = -60.0
"""Minimum log-prob of a candidate."""


class OutcomePredictor(Protocol):
    """Estimates the probabilities of outcomes of pending proposals, and learns from verdicts. Each
    class of sessions has a predictor of its own."""

    def expected_gains(self, layout: CandidateLayout, logprobs: NDArray[np.float32]) -> Floats:
        """Return the expected gain [P, c] of drafting for each outcome, which is the outcome's
        estimated probability. An outcome is one of P places (roots and nodes) and one of the c
        candidate tokens there. `logprobs` [P, c]: draft model's log-prob of each candidate; -inf
        marks an unused entry. The gain of a candidate that is a child of its place has no meaning,
        because that token continues the accepted path."""
        ...

    def learn_from_verdict(
        self, layout: CandidateLayout, logprobs: NDArray[np.float32], what: VerdictPath
    ) -> None:
        """Learn from `what`, the path that a verdict took through a proposal. `logprobs`: as in
        `expected_gains`."""
        ...


class OutcomeCalibration:
    """Predictor that calibrates the draft model's probabilities by depth, rank and probability.

    The probability of an outcome is P(the accepted path ends at its node) * P(its token follows
    there). First, all log-probs are multiplied by one factor, `sharpness`, which is fitted from few
    observations. Then both probabilities are estimated from counts of emitted tokens, kept for each
    cell of similar depth, rank and probability. The draft model's probability is the prior.
    """

    def __init__(self, sharpness: float = 1.0) -> None:
        self.sharpness = sharpness
        """Factor by which log-probs are multiplied; 1 leaves the draft model's probabilities
        unchanged."""
        self._firmness = _FIRMNESS[0]
        self._seen = np.zeros(_CELLS)
        self._hits = np.zeros(_CELLS)
        self._places = np.zeros(_DEPTHS)
        """Number of reached places, by depth."""
        self._among = np.zeros(_DEPTHS)
        """Number of reached places where the emitted token was a candidate, by depth."""
        self._lines = self._fitted()
        """Offsets a and slopes b by cell: the calibrated probability is a + b * (sharpened
        probability of the draft model)."""

    def expected_gains(self, layout: CandidateLayout, logprobs: NDArray[np.float32]) -> Floats:
        """See `OutcomePredictor`."""
        probs = self.probs(layout.depths, logprobs)
        size = logprobs.shape[1]
        known = probs[layout.parent_indices, np.minimum(layout.ranks, size - 1)]
        # A node that is no candidate has at most the probability that the candidates leave.
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
        """Return the probability that each candidate is emitted once its place is reached, float64
        [m, c] for m places with c candidates each. The sum of a row is at most 1. `depths` [m]:
        depth of each place. `logprobs` [m, c]: a candidate with log-prob -inf has probability 0."""
        offsets, slopes = self._lines
        own = self._sharpened(_with_rest(logprobs))[:, :-1]
        cells = _cells(depths, own)
        found = own * slopes[cells]
        found += offsets[cells]
        found[logprobs == -np.inf] = 0.0
        at = np.minimum(depths, _DEPTHS - 1)
        among = own.sum(axis=1) * _PRIOR + self._among[at]
        among /= self._places[at] + _PRIOR
        # The estimates of a row are independent, so their sum must be corrected.
        sums = np.maximum(found.sum(axis=1), _TINY)
        found *= (np.minimum(among, 1.0) / sums)[:, None]
        return found

    def observe(self, depths: Indices, logprobs: NDArray[np.float32], columns: Indices) -> None:
        """Record which token was emitted at each of m places. `depths` [m]: depth of the place;
        `logprobs` [m, c]: log-probs of its c candidates; `columns` [m]: index of the emitted
        candidate, -1 if no candidate was emitted. Places without candidates are ignored."""
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
        # Computed here because learning is not urgent, while a pass is.
        self._lines = self._fitted()

    def _sharpened(self, told: Floats) -> Floats:
        """Return the sharpened distribution [m, c + 1] of the log-probs returned by
        `_with_rest`."""
        distribution = np.exp(told * self.sharpness)
        distribution /= distribution.sum(axis=1, keepdims=True)
        return distribution

    def _sharpen(self, told: Floats, distribution: Floats, columns: Indices) -> None:
        """Do one Newton step for the sharpness on the log-loss. The curvature is accumulated over
        all observations."""
        # Index -1 selects the last column, which stands for all remaining tokens.
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
    """Return the log-probs of the candidates and, in the last column, of all remaining tokens
    together, [m, c + 1]. Very small and missing probabilities are raised to `_LEAST`."""
    told = np.empty((len(logprobs), logprobs.shape[1] + 1))
    told[:, :-1] = logprobs
    told[:, -1] = np.log(np.maximum(1.0 - np.exp(told[:, :-1]).sum(axis=1), _REST))
    found: Floats = np.maximum(told, _LEAST)
    return found


def _cells(depths: Indices, own: Floats) -> Indices:
    """Return the cell index [m, c] of each candidate by depth, rank and the draft model's
    probability `own` [m, c]."""
    at = np.minimum(depths, _DEPTHS - 1)[:, None] * len(_RANKS) + _rank_bins(own.shape[1])
    cells: Indices = at * _BINS + np.searchsorted(_PROBS, own)
    return cells


@cache
def _rank_bins(width: int) -> Indices:
    bins: Indices = np.searchsorted(_RANKS, np.arange(width), side="right") - 1
    return bins


_FIRST_DRAWN: Final = 0.62
"""Assumed probability that an accepted child of a place is its first child. Each later child gets
the same share of the remaining probability."""
_SPREAD_DEPTHS: Final = 16
_SPREAD_RANKS: Final = 64
_SPREAD_PRIOR: Final = 8.0


class RankCalibration:
    """Predictor for the rejection rule. It learns how often a path continues at each depth, and how
    often a token of each rank is emitted at the end of a path.

    The rank of a candidate is its place, by probability, among the candidates that were not drawn
    as children. Children are taken in the order in which they were drawn; their probabilities are
    not used.
    """

    def __init__(self) -> None:
        self._reached = np.zeros(_SPREAD_DEPTHS)
        """Number of reached places with children, by depth."""
        self._stood = np.zeros(_SPREAD_DEPTHS)
        """Number of reached places of which a child was accepted, by depth."""
        ranks = np.arange(1, _SPREAD_RANKS + 1, dtype=np.float64) ** -1.5
        self._ranks = np.tile(_SPREAD_PRIOR * ranks / ranks.sum(), (2, 1))
        """Number of times that a token of each rank was emitted at the end of a path. Row 0 is for
        places with children (the token is resampled after a rejection), row 1 for places without
        (the bonus token)."""

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
    """Return which places have children, bool [P]."""
    inner = np.zeros(len(layout.parent_indices), dtype=np.bool_)
    inner[layout.parent_indices[layout.depths > 0]] = True
    return inner


def _left(layout: CandidateLayout) -> Indices:
    """Return the rank of each candidate among the candidates of its place that are not children,
    [P, c]."""
    ranks = np.cumsum(~layout.is_child, axis=1) - 1
    found: Indices = np.clip(ranks, 0, _SPREAD_RANKS - 1)
    return found


def _shares(layout: CandidateLayout) -> Floats:
    """Return the assumed share of each node among its siblings, [P]. Siblings are in the order in
    which they were drawn."""
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
