"""Bit-exact model of the matrix unit of NVIDIA Hopper, for kernels that run in the interpreter.

A product has M rows, N columns and sums over K features, indexed by k. The model was measured on an
H100 and an H200 with 510 configurations (tile sizes, warps, mma.sync and wgmma): the bits of a
product with 16-bit operands depend only on the order of k. The unit processes the features in
groups of 16. It aligns the 16 products and the accumulator to the largest exponent among them,
truncates each to 25 fraction bits, adds them, and truncates the sum to float32. A product with
float32 operands ("ieee") is a chain of fused multiply-adds in the order of k.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 16
"""Number of features that the unit adds in one step."""
FRACTION_BITS: Final = 25
"""Number of bits below the largest exponent to which a summand is truncated."""
_ZERO_EXPONENT: Final = -4000
"""Exponent assigned to zero, below all others."""

Float32s = NDArray[np.float32]


def multiply_16_bit(a: Float32s, b: Float32s, acc: Float32s) -> Float32s:
    """Return acc + a @ b, float32 [M, N], as the matrix unit computes it for 16-bit operands.

    a [M, K] and b [K, N] hold bfloat16 or float16 values, converted to float32. K is a multiple of
    16.
    """
    acc = acc.astype(np.float32)
    a_exponents, b_exponents = _exponents(a), _exponents(b)
    for first in range(0, a.shape[1], GROUP):
        group = slice(first, first + GROUP)
        left, right = a[:, group].astype(np.float64), b[group].T.astype(np.float64)
        products = left[:, None, :] * right[None, :, :]
        exponents = a_exponents[:, None, group] + b_exponents[group].T[None, :, :]
        largest = np.maximum(exponents.max(axis=2), _exponents(acc))
        unit = np.ldexp(1.0, np.maximum(largest, -900) - FRACTION_BITS)
        summed = np.trunc(products / unit[:, :, None]).sum(axis=2)
        summed += np.trunc(acc.astype(np.float64) / unit)
        acc = _cut_to_float32(summed * unit)
    return acc


def multiply_32_bit(a: Float32s, b: Float32s, acc: Float32s) -> Float32s:
    """Return acc + a @ b, float32 [M, N], for float32 operands, by one fused multiply-add for each
    of the K features."""
    acc = acc.astype(np.float32)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    for k in range(a.shape[1]):
        acc = (wide_a[:, k, None] * wide_b[None, k] + acc).astype(np.float32)
    return acc


def _exponents(values: Float32s) -> NDArray[np.int64]:
    """Return the binary exponents of normal numbers; subnormal numbers count as zero."""
    raw = (values.astype(np.float32).view(np.int32).astype(np.int64) >> 23) & 0xFF
    return np.where(raw > 0, raw - 127, _ZERO_EXPONENT)


def _cut_to_float32(values: NDArray[np.float64]) -> Float32s:
    """Return the values as float32, rounded towards zero."""
    rounded = values.astype(np.float32)
    too_large = np.abs(rounded.astype(np.float64)) > np.abs(values)
    return np.where(too_large, np.nextafter(rounded, np.float32(0)), rounded)
