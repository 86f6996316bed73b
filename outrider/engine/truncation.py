"""Truncation thresholds of top-k, top-p and min-p, identical to the bit on every device.

top-p compares sums of thousands of probabilities with a limit, and a sum of floats depends on its
order. Therefore each id has an integer mass instead: 2^43 for the most probable id, and half as
much for every octave (log 2 of score) below it. Distances in score are rounded down to 2^-16
octaves. A sum of integers does not depend on its order. The mass of a set of ids deviates from its
exact probability by about one part in 10^5.

    mass(s) = 2^43 * 2^-(x / 65536),  x = floor(float32(peak - s) * float32(65536 / log 2))
    need    = max(floor(float64(sum of all masses) * top_p), 1)
    edge    = the smallest score s with (mass of all scores above s) < need

All scores at or above the edge are kept, ties included. Shape suffixes: R rows, V columns.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STEP_BITS: Final = 16
STEPS_PER_NAT: Final = float(np.float32(2**STEP_BITS / math.log(2.0)))
MAX_DISTANCE: Final = 64.0
"""Maximum distance of a score from the largest one, in nats. Larger distances are clipped to it.
This changes nothing, because the mass is 0 from 30 nats on."""
EXP2_POLYNOMIAL: Final = (
    8796092540511,
    -6096952079359,
    2112641131570,
    -486420488294,
    81019718246,
    -8334770009,
)
"""Coefficients of a polynomial of f in [0, 1) that approximates 2^43 * 2^-f, the constant term
first. Its relative error is at most 10^-7."""
MAX_COLUMNS: Final = 2**19
"""Maximum number of columns. The sum of this many masses of 2^43 fits into an int64."""
_FARTHEST: Final = np.float32(MAX_DISTANCE)
_STEPS_PER_NAT: Final = np.float32(STEPS_PER_NAT)


def probability_masses(distances: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the integer mass of each id, at most 2^43 (see `outrider.engine.truncation`).

    `distances` says how far the score of each id lies below the row's largest score, in nats (>= 0,
    not NaN).
    """
    steps = (np.minimum(distances, _FARTHEST) * _STEPS_PER_NAT).astype(np.int32)
    octaves = np.minimum(steps >> STEP_BITS, 62)
    mass: NDArray[np.int64] = np.take(_octave(), steps & (2**STEP_BITS - 1)) >> octaves
    return mass


@lru_cache(maxsize=1)
def _octave() -> NDArray[np.int64]:
    """Return the masses at the 65536 steps of the first octave below the largest score."""
    fractions = np.arange(2**STEP_BITS, dtype=np.int64)
    mass = np.full_like(fractions, EXP2_POLYNOMIAL[-1])
    for coefficient in EXP2_POLYNOMIAL[-2::-1]:
        mass = (mass * fractions >> STEP_BITS) + coefficient
    return mass


def min_p_floor(min_p: float) -> float:
    """Return log(min_p): the lowest score that min-p keeps, relative to the largest score of the
    row. Return -inf if min_p is 0."""
    return math.log(min_p) if min_p > 0.0 else -math.inf


def probability_thresholds(
    scores_RV: Tensor, top_ks: list[int], top_ps: list[float], floors: list[float]
) -> Tensor:
    """Return the lowest score that each row keeps, float32 [R].

    `scores_RV` is float32 without NaN or +inf and with at least one finite entry per row. The lists
    have one entry per row; `floors` are results of `min_p_floor`. top_k 0, top_p 1 and floor -inf
    disable a criterion. top-p applies to the scores that top-k has kept.
    """
    peaks = scores_RV.amax(dim=-1)
    lowest = peaks + torch.tensor(floors, dtype=torch.float32, device=peaks.device)
    for row, (top_k, top_p) in enumerate(zip(top_ks, top_ps, strict=True)):
        scores = scores_RV[row]
        if 0 < top_k < len(scores):
            edge = scores.topk(top_k, sorted=True).values[-1]
            scores = scores[scores >= edge]
            lowest[row] = torch.maximum(lowest[row], edge)
        if top_p < 1.0:
            edge = torch.tensor(_nucleus_edge(scores.cpu().numpy(), top_p), device=peaks.device)
            lowest[row] = torch.maximum(lowest[row], edge)
    return lowest


def _nucleus_edge(scores_V: NDArray[np.float32], top_p: float) -> np.float32:
    peak = scores_V.max()
    mass = probability_masses(peak - scores_V)
    total = int(mass.sum())
    need = max(int(float(total) * top_p), 1)
    # Ids lighter than this weigh less than total - need together: the edge is above them.
    possible = scores_V[mass >= (total - need) // len(scores_V)]
    ordered = np.sort(possible)[::-1]
    before = probability_masses(peak - ordered).cumsum()[:-1]
    edge: np.float32 = ordered[np.count_nonzero(before < need)]
    return edge
