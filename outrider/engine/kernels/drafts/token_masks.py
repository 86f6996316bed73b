# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Allowed-token masks (grammars) applied to draft logits.

Shapes: B rows, Vd draft vocabulary size, C masks (rows of bits) of W words for 32 target ids each.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.session_tensors import AllowedTokenBits

_TILE = 2048


def mask_drafts(logits: Tensor, allowed_tokens: AllowedTokenBits, ids: Tensor) -> None:
    """Set the draft logits of all tokens that a row's mask does not allow to -inf, in place.

    logits: float32 [B, Vd]. ids: int64 [Vd], the target id of each column. Rows whose entry in
    `allowed_tokens.row_indices` is 0 have no mask and are not changed.
    """
    function = mask_drafts_triton if logits.is_cuda else mask_drafts_torch
    function(logits, allowed_tokens, ids)


def mask_drafts_torch(logits: Tensor, allowed_tokens: AllowedTokenBits, ids: Tensor) -> None:
    """Compute `mask_drafts` with PyTorch operators."""
    places = allowed_tokens.row_indices[: len(logits)].long()
    words = allowed_tokens.bits.index_select(0, places).index_select(1, ids >> 5)
    allowed = ((words >> (ids & 31).int()) & 1) != 0
    logits.masked_fill_(~allowed & (places > 0)[:, None], -math.inf)


def mask_drafts_triton(logits: Tensor, allowed_tokens: AllowedTokenBits, ids: Tensor) -> None:
    """Compute `mask_drafts` with one Triton kernel. Programs of rows without a mask return
    immediately."""
    rows, columns = logits.shape
    _mask_kernel[(rows, triton.cdiv(columns, _TILE))](
        logits,
        logits.stride(0),
        columns,
        allowed_tokens.bits,
        allowed_tokens.bits.shape[1],
        allowed_tokens.row_indices,
        ids,
        TILE=_TILE,
    )


@triton.jit
def _mask_kernel(
    logits_ptr, logits_stride, columns, bits_ptr, words, places_ptr, ids_ptr, TILE: tl.constexpr
):
    row = tl.program_id(0)
    place = tl.load(places_ptr + row)
    if place > 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < columns
        ids = tl.load(ids_ptr + column, mask=inside, other=0)
        here = place.to(tl.int64) * words + (ids >> 5)
        bits = tl.load(bits_ptr + here, mask=inside, other=-1)
        allowed = ((bits >> (ids & 31).to(tl.int32)) & 1) != 0
        to = logits_ptr + row.to(tl.int64) * logits_stride + column
        tl.store(to, tl.full((TILE,), float("-inf"), tl.float32), mask=inside & (allowed == 0))
