"""Goodness of fit for the statistical tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike


def chi_square_excess(counts: ArrayLike, probs: ArrayLike, *, least: float = 5.0) -> float:
    """How many sigmas of chi-square the counts are off: (chi2 - df) / sqrt(2 df).

    Bins are merged, rarest first, until every bin expects at least `least`.
    """
    chi2, freedom = _chi_square(counts, probs, least=least)
    return (chi2 - freedom) / float(np.sqrt(2.0 * freedom))


def _chi_square(counts: ArrayLike, probs: ArrayLike, *, least: float) -> tuple[float, int]:
    """(chi-square, degrees of freedom); infinite if something impossible was observed."""
    observed = np.asarray(counts, dtype=np.float64).ravel()
    expected = np.asarray(probs, dtype=np.float64).ravel()
    expected = expected / expected.sum() * observed.sum()
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    starts, mass = [0], 0.0
    for index, value in enumerate(expected):
        if mass >= least:
            starts.append(index)
            mass = 0.0
        mass += value
    if mass < least and len(starts) > 1:
        starts.pop()
    observed = np.add.reduceat(observed, starts)
    expected = np.add.reduceat(expected, starts)
    impossible = expected == 0.0
    if observed[impossible].any():
        return float("inf"), 1
    observed, expected = observed[~impossible], expected[~impossible]
    return float(((observed - expected) ** 2 / expected).sum()), max(len(expected) - 1, 1)


LIMIT = 10.0
"""Tests with few bins pass below chi2 = df + 10 sqrt(2 df); their seeds are fixed. With many bins
`p_value` sees the same bias in half the trials: a millionth is 6 sigma at 60 bins, 5 at 4,000."""


def p_value(counts: ArrayLike, probs: ArrayLike, *, least: float = 5.0) -> float:
    """Probability of a chi-square at least as large as that of `counts` if they follow `probs`.

    Bins are merged as in `chi_square_excess`; 0 if something impossible was observed.
    """
    chi2, freedom = _chi_square(counts, probs, least=least)
    halves = torch.tensor([freedom / 2, chi2 / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


LEAST_P = 1e-6
"""Tests with fixed seeds pass above this p-value: one in a million would fail of the honest ones,
and with 200,000 trials a bias of 3 % of a probable token is far below it."""


def least_bias(probs: ArrayLike, trials: int, *, least: float = 5.0) -> float:
    """The power of `p_value` < LEAST_P with so many trials: the least relative change of the
    likeliest id's probability that it sees on average, all others scaled to make up for it."""
    distribution = np.asarray(probs, dtype=np.float64).ravel()
    distribution = distribution / distribution.sum()
    _, freedom = _chi_square(distribution * trials, distribution, least=least)
    # Wilson and Hilferty's cube; a normal's tail holds LEAST_P from 4.7534 sigmas on.
    spread = 2.0 / (9.0 * freedom)
    chi2 = freedom * (1.0 - spread + 4.7534 * np.sqrt(spread)) ** 3
    likeliest = float(distribution.max())
    return float(np.sqrt((chi2 - freedom) * (1.0 - likeliest) / (trials * likeliest)))
