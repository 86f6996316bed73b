"""64-bit mixing function (mix64) for prefix digests and noise.

mix64 is the output function of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014), a bijection of 64-bit words. All arithmetic is on integers modulo 2^64,
so all processes compute the same values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK64 = 2**64 - 1
GOLDEN64 = 0x9E3779B97F4A7C15
"""Weyl increment of SplitMix64. It is odd, so k * GOLDEN64 takes every value of a word."""
MULTIPLIER_A = 0xBF58476D1CE4E5B9
MULTIPLIER_B = 0x94D049BB133111EB


def mix64(x: int) -> int:
    """Return mix64 of a word. `x` may be any int and is first reduced modulo 2^64."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * MULTIPLIER_A) & MASK64
    x = ((x ^ (x >> 27)) * MULTIPLIER_B) & MASK64
    return x ^ (x >> 31)


def mix64_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a new array with mix64 of every element of a uint64 array."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_A)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_B)
        return np.asarray(x ^ (x >> np.uint64(31)), dtype=np.uint64)


def mix64_in_place(x: NDArray[np.uint64]) -> None:
    """Replace every element of a uint64 vector by its mix64, in place."""
    # numpy warns of overflows in scalar operations only, so errstate is not needed here.
    x ^= x >> _SHIFT_A
    x *= _FACTOR_A
    x ^= x >> _SHIFT_B
    x *= _FACTOR_B
    x ^= x >> _SHIFT_C


_FACTOR_A, _FACTOR_B = np.uint64(MULTIPLIER_A), np.uint64(MULTIPLIER_B)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)
