# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Triton implementation of `outrider.spec.noise`, and the Gumbel-perturbed argmax of a tile.

Integers are uint64 (with wrap-around products and logical shifts) and equal those of the numpy
implementation bit for bit. Variates are float64. They may differ between platforms by the rounding
of the logarithm (one ulp).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.session_tensors import NUM_STREAMS
from outrider.engine.noise import mix64_
from outrider.spec.mix64 import GOLDEN64, MULTIPLIER_A, MULTIPLIER_B

_GOLDEN = tl.constexpr(GOLDEN64)
_MULTIPLIER_A = tl.constexpr(MULTIPLIER_A)
_MULTIPLIER_B = tl.constexpr(MULTIPLIER_B)
_NUM_STREAMS = tl.constexpr(NUM_STREAMS)
_LAST_MANTISSA = tl.constexpr(2**52 - 1)
_SCALE = tl.constexpr(2.0**-52)
_NO_COLUMN = tl.constexpr(2**31 - 1)

_ESTIMATE_ERROR = tl.constexpr(1e-3)
"""Upper bound of |gumbel_estimate - gumbel|: thirty times the error that a logarithm with a
relative error of 2^-22 causes."""
_SCORE_ERROR = tl.constexpr(2.0**-20)
"""Upper bound of the relative error of a float32 sum of score and noise."""
_NOISE_RANGE = tl.constexpr(64.0)
"""Upper bound of the absolute value of all Gumbel variates."""


def row_keys(stream_keys: Tensor, positions: Tensor) -> Tensor:
    """Return the noise key of each row, as `spec.noise.noise_keys` does, on the device of the
    tensors.

    stream_keys: int64, the key of each row's random stream. positions: absolute positions, >= 0.
    The two are broadcast against each other. The keys are uint64 words, stored as int64.
    """
    return mix64_(stream_keys + positions.to(torch.int64))


@triton.jit
def mix64(x):
    """Apply the hash function `outrider.spec.mix64` to uint64 words."""
    x = (x ^ (x >> 30)) * _MULTIPLIER_A
    x = (x ^ (x >> 27)) * _MULTIPLIER_B
    return x ^ (x >> 31)


@triton.jit
def noise_key(stream_keys_ptr, slot, stream, position):
    """Return the noise key of a session's random stream at a position, as a uint64 word.
    stream_keys: int64 [X, NUM_STREAMS], indexed by session slot and stream - 1. stream: a
    `NoiseStream`, >= 1."""
    stream_key = tl.load(stream_keys_ptr + slot * _NUM_STREAMS + stream - 1)
    return mix64(stream_key.to(tl.uint64) + position.to(tl.uint64))


@triton.jit
def noise_bits(key, ids):
    """Return 64 random bits for each id, as uint64 words. They depend only on `key` and the id, an
    integer >= -1."""
    return mix64(key + (ids.to(tl.int64) + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def uniform(bits):
    """Convert 64 random bits to uniform variates in (0, 1), float64."""
    return ((bits >> 12).to(tl.float64) + 0.5) * _SCALE


@triton.jit
def gumbel(bits):
    """Convert 64 random bits to Gumbel(0, 1) variates, float64, all finite."""
    return -tl.log(-tl.log(uniform(bits)))


@triton.jit
def gumbel_estimate(bits):
    """Return the variates of `gumbel` in float32, with an error of at most _ESTIMATE_ERROR.

    The distance s of the uniform variate U to the nearer end of (0, 1) is precise in float32. Near
    U = 1, where log U is not precise in float32, it is computed by the series -log U = s + s^2/2 +
    s^3/3 + s^4/4 + ...
    """
    mantissas = bits >> 12
    upper = (mantissas >> 51) != 0
    distances = tl.where(upper, mantissas ^ _LAST_MANTISSA, mantissas)
    s = (distances.to(tl.int64).to(tl.float32) + 0.5) * _SCALE
    series = s * (1.0 + s * (0.5 + s * (0.33333333 + s * 0.25)))
    exponentials = -tl.log(tl.where(upper, 1.0 - s, s))
    return -tl.log(tl.where(upper & (s < 0.0625), series, exponentials))


@triton.jit
def best_of(scores, columns, valid):
    """Return the largest score of a tile, and the lowest column with this score. If all scores are
    -inf, return -inf and the first valid column."""
    top = tl.max(scores, 0)
    return top, tl.min(tl.where((scores == top) & valid, columns, _NO_COLUMN), 0)


@triton.jit
def best_perturbed(scores, columns, valid, key, ids_ptr, HAS_IDS: tl.constexpr):
    """Return the largest sum of a score and its Gumbel noise in a tile, float64, and the lowest
    column with this sum.

    scores: float32, without NaN or +inf; -inf for columns that cannot be chosen. If no column can
    be chosen, the result is -inf and the first valid column. HAS_IDS: whether the noise depends on
    the id ids_ptr[column] instead of the column.

    The noise is estimated in float32 for all columns. Only columns whose estimate is within twice
    the error bound of the largest estimate can be the best, so float64 noise is computed only for
    these. The result is therefore exact.
    """
    best = tl.full((), float("-inf"), tl.float64)
    best_column = tl.min(tl.where(valid, columns, _NO_COLUMN), 0)
    # What top-p leaves is in few tiles: the others need no noise.
    if tl.max(scores, 0) > float("-inf"):
        ids = columns
        if HAS_IDS:
            ids = tl.load(ids_ptr + columns, mask=valid, other=0).to(tl.int32)
        estimates = scores + gumbel_estimate(noise_bits(key, ids))
        top = tl.max(estimates, 0)
        error = _ESTIMATE_ERROR + (tl.abs(top) + _NOISE_RANGE) * _SCORE_ERROR
        possible = (estimates >= top - 2.0 * error) & (scores > float("-inf"))
        column = tl.min(tl.where(possible, columns, _NO_COLUMN), 0)
        while column < _NO_COLUMN:
            here = columns == column
            score = tl.max(tl.where(here, scores, float("-inf")), 0).to(tl.float64)
            token = tl.max(tl.where(here, ids, 0), 0)
            exact = score + gumbel(noise_bits(key, token))
            best_column = tl.where(exact > best, column, best_column)
            best = tl.where(exact > best, exact, best)
            column = tl.min(tl.where(possible & (columns > column), columns, _NO_COLUMN), 0)
    return best, best_column
