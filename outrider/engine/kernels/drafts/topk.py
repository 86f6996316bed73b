# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Top-k log-probabilities of draft logits, first per tile of columns, then per row.

Shape suffixes: R rows, V columns, K columns to choose, P tiles of a row.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.logits_processor import MAX_LOGIT
from outrider.errors import InvalidRequestError

MAX_TOPK: Final = 16

_MAX_LOGIT = tl.constexpr(MAX_LOGIT)
_LAST_INT32 = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))
_MINUS_INF_ORDER = tl.constexpr(-2139095041)
"""The result of `ordered` for -inf."""


def log_softmax_topk(
    logits: Tensor, k: int, *, temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest values of log_softmax(logits / temperature) of every row, and their
    columns, best first. Of equal values, the one in the lower column comes first.

    logits: float32 or bfloat16 [R, V], columns contiguous; NaN counts as -inf, +inf as 1e30.
    temperatures: float32 [R], where values that are not positive count as 1; None for 1. The result
    is log-probs, float32 [R, k], and columns, int32 [R, k]. If a row has fewer than k columns of
    positive probability, the rest is -inf and -1. Raises InvalidRequestError unless 1 <= k <=
    MAX_TOPK.
    """
    if not 1 <= k <= MAX_TOPK:
        raise InvalidRequestError(f"k must be in [1, {MAX_TOPK}], got {k}", reason="KERNEL_SHAPES")
    function = log_softmax_topk_triton if logits.is_cuda else log_softmax_topk_torch
    return function(logits, k, temperatures=temperatures)


def log_softmax_topk_torch(
    logits: Tensor, k: int, *, temperatures: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `log_softmax_topk` with PyTorch operators."""
    scores = logits.to(torch.float32).nan_to_num(nan=-math.inf, posinf=MAX_LOGIT, neginf=-math.inf)
    scores = scores.clamp(max=MAX_LOGIT)
    if temperatures is not None:
        divisors = torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
        scores = scores / divisors[:, None]
    missing = max(k - scores.shape[1], 0)
    scores = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
    best, columns = scores.sort(dim=-1, descending=True, stable=True)
    best, columns = best[:, :k], columns[:, :k].to(torch.int32)
    logprobs = best - scores.logsumexp(dim=-1, keepdim=True)
    none = best == -math.inf
    return logprobs.masked_fill(none, -math.inf), columns.masked_fill(none, -1)


def log_softmax_topk_triton(
    logits: Tensor, k: int, *, temperatures: Tensor | None = None, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `log_softmax_topk` with Triton kernels. tile: number of columns per program, a power
    of two; None for a default that depends on the shape."""
    rows, columns = logits.shape
    tile = tile or (1024 if rows <= 16 else 2048)
    tiles = cdiv(columns, tile)
    maxima = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    keys = torch.empty(rows, tiles * k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return logprobs, chosen
    _topk_of_tile[(rows, tiles)](
        logits,
        logits.stride(0),
        columns,
        temperatures,
        maxima,
        sums,
        keys,
        HAS_TEMPERATURES=temperatures is not None,
        K=k,
        TILE=tile,
        num_warps=4,
    )
    _topk_of_tiles[(rows,)](
        maxima,
        sums,
        keys,
        logprobs,
        chosen,
        tiles,
        K=k,
        TILES=next_power_of_2(tiles),
        KEYS=next_power_of_2(tiles * k),
        num_warps=4,
    )
    return logprobs, chosen


@triton.jit
def ordered(values):
    """Map float32 values other than NaN to int32 values of the same order. The same operation on
    the bits of the result restores the bits of the float32 value."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LAST_INT32)


@triton.jit
def _topk_of_tile(
    logits_ptr,
    logits_stride,
    num_columns,
    temperatures_ptr,
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    HAS_TEMPERATURES: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the maximum, the sum of exponentials and the K best columns of one tile of one row.

    A column is stored as an int64 key: its score (see `ordered`) in the upper 32 bits, and its
    inverted index in the lower ones. The largest key is the best score and, among equal scores, the
    lowest column.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * TILE + tl.arange(0, TILE)
    valid = columns < num_columns
    logits_ptr += row * logits_stride
    scores = tl.load(logits_ptr + columns, mask=valid, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("-inf"))
    scores = tl.where(scores > _MAX_LOGIT, _MAX_LOGIT, scores)
    if HAS_TEMPERATURES:
        temperature = tl.load(temperatures_ptr + row)
        temperature = tl.where(temperature > 0.0, temperature, 1.0)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0 and 0 are equal
    top = tl.max(scores, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    where = row * tl.num_programs(1) + part
    tl.store(maxima_ptr + where, top)
    tl.store(sums_ptr + where, tl.sum(tl.exp(scores - shift), 0))
    keys = (ordered(scores).to(tl.int64) << 32) + (columns ^ _LAST_INT32).to(tl.int64)
    keys = tl.where(valid, keys, _NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + where * K + rank, best)
        keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit
def _topk_of_tiles(
    maxima_ptr,
    sums_ptr,
    keys_ptr,
    logprobs_ptr,
    chosen_ptr,
    tiles,
    K: tl.constexpr,
    TILES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the K best columns of one row and their log-probs, given the results of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, TILES)
    maxima = tl.load(maxima_ptr + row * tiles + parts, mask=parts < tiles, other=float("-inf"))
    sums = tl.load(sums_ptr + row * tiles + parts, mask=parts < tiles, other=0.0)
    top = tl.max(maxima, 0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(sums * tl.exp(maxima - shift), 0)
    logsumexp = shift + tl.log(tl.where(total > 0.0, total, 1.0))
    places = tl.arange(0, KEYS)
    keys = tl.load(keys_ptr + row * tiles * K + places, mask=places < tiles * K, other=_NO_KEY)
    for rank in tl.static_range(K):
        best = tl.max(keys, 0)
        order = (best >> 32).to(tl.int32)
        score = (order ^ ((order >> 31) & _LAST_INT32)).to(tl.float32, bitcast=True)
        there = order > _MINUS_INF_ORDER
        column = (best & 0x7FFFFFFF).to(tl.int32) ^ _LAST_INT32
        tl.store(logprobs_ptr + row * K + rank, tl.where(there, score - logsumexp, float("-inf")))
        tl.store(chosen_ptr + row * K + rank, tl.where(there, column, -1))
        keys = tl.where(keys == best, _NO_KEY, keys)
