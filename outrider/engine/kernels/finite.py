# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Detection of rows of logits without a finite value, before the logits are processed.

Such a row is invalid (because of NaN weights or an overflow), so no token is chosen from it.

Shape suffixes: R rows, V columns of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Number of columns that are checked in one step. The first step nearly always finds a finite
logit."""


def find_finite_rows(logits: Tensor) -> Tensor:
    """Return for each row 1 if it has a finite logit, else 0, int32 [R].

    logits: float32 or bfloat16 [R, V], columns contiguous, rows of any stride.
    """
    function = find_finite_rows_triton if logits.is_cuda else find_finite_rows_torch
    return function(logits)


def find_finite_rows_torch(logits: Tensor) -> Tensor:
    """Compute `find_finite_rows` with PyTorch operators."""
    return logits.isfinite().any(dim=-1).to(torch.int32)


def find_finite_rows_triton(logits: Tensor, *, tile: int = TILE) -> Tensor:
    """Compute `find_finite_rows` with one Triton kernel. tile: number of columns per step, a power
    of two."""
    rows, columns = logits.shape
    found = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _find_finite[(rows,)](logits, logits.stride(0), columns, found, TILE=tile, num_warps=4)
    return found


@triton.jit
def _find_finite(logits_ptr, logits_stride, num_columns, found_ptr, TILE: tl.constexpr):
    """Search one row, tile by tile, until a tile has a finite logit."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    start = tl.full((), 0, tl.int32)
    found = tl.full((), 0, tl.int32)
    while (found == 0) & (start < num_columns):
        columns = start + tl.arange(0, TILE)
        values = tl.load(logits_ptr + columns, mask=columns < num_columns, other=float("inf"))
        # False for NaN, too.
        is_finite = tl.abs(values.to(tl.float32)) < float("inf")
        found = tl.max(is_finite.to(tl.int32), 0)
        start += TILE
    tl.store(found_ptr + row, found)
