"""Goodness of fit for the statistical tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def chi_square_excess(counts: ArrayLike, probs: ArrayLike, *, least: float = 5.0) -> float:
    """How many sigmas of chi-square the counts are off: (chi2 - df) / sqrt(2 df).

    Bins are merged, rarest first, until every bin expects at least `least`.
    """
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
        return float("inf")
    observed, expected = observed[~impossible], expected[~impossible]
    freedom = max(len(expected) - 1, 1)
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    return (chi2 - freedom) / float(np.sqrt(2.0 * freedom))


LIMIT = 10.0
"""The tests pass below chi2 = df + 10 sqrt(2 df); their seeds are fixed."""
