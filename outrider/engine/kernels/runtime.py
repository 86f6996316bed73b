# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Helpers shared by all kernels: interpreter detection, a safe dot, grid arithmetic."""

from __future__ import annotations

import os
from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU: read when the kernels are imported."""


@triton.jit
def dot(a, b, acc, INTERPRETED: tl.constexpr):
    """acc + a @ b with float32 accumulation.

    The interpreter's bfloat16 dot is wrong (Triton 3.6 to 3.9), so its operands are widened there.
    float32 operands are multiplied as such (ieee), never as tf32.
    """
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n; 1 for n <= 1."""
    return 1 << max(n - 1, 0).bit_length()
