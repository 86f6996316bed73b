# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Helpers shared by all kernels: interpreter detection, a safe dot, grid arithmetic."""

from __future__ import annotations

import os
from typing import Any, Final

import triton
import triton.language as tl

from outrider.engine.kernels.matrix_unit import multiply_16_bit, multiply_32_bit

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on the CPU. Determined when this module is
imported."""

if INTERPRETED:

    def dot(a: Any, b: Any, acc: Any) -> Any:
        """Return acc + a @ b with the same bits as the GPU's matrix unit (see `matrix_unit`).

        It replaces `tl.dot`, which in the interpreter is numpy's matrix product: its order of
        summation depends on the shapes, and it is wrong for bfloat16 (Triton 3.6 to 3.9).
        """
        multiply = multiply_32_bit if a.dtype == tl.float32 else multiply_16_bit
        left, right = (x.to(tl.float32).handle.data for x in (a, b))
        result = multiply(left, right, acc.handle.data)
        return acc.__class__(type(acc.handle)(result, acc.handle.dtype), acc.type)

else:

    @triton.jit
    def dot(a, b, acc):
        """Return acc + a @ b, accumulated in float32. Products of float32 operands are computed in
        IEEE float32, never in TF32."""
        return tl.dot(a, b, acc, input_precision="ieee")


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n; 1 for n <= 1."""
    return 1 << max(n - 1, 0).bit_length()
