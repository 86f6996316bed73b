# pyright: reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# mypy: disable-error-code="no-untyped-def,no-untyped-call,no-any-return,untyped-decorator"
"""Top-k draft tokens under the coupled rule: the largest sums of score and shared noise.

The noise is the Gumbel noise that the verifier uses at the same position, so that the drafter tends
to choose the token that the target samples. This is the device version of
`outrider.engine.draft_sampling`. Drafts need not be exact, so the noise is the float32 estimate of
`kernels.noise`: columns whose sums are within 10^-3 of each other may change places.

Shape suffixes: R rows (one per draft node), V columns of the logits, k columns to choose, P tiles
of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.engine.draft_sampling import DRAFT_LOGIT_ERROR, NUM_RUNNER_UPS, coupled_logprobs
from outrider.engine.kernels.drafts.topk import MAX_TOPK, ordered
from outrider.engine.kernels.noise import gumbel_estimate, noise_bits, noise_key, row_keys
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.engine.kernels.sampling import scaled_scores, scaled_tile
from outrider.engine.kernels.session_tensors import RULE_COUPLED, SamplingState
from outrider.engine.noise import perturbed_topk
from outrider.errors import InvalidRequestError
from outrider.spec.noise import NoiseStream

_COUPLED = tl.constexpr(RULE_COUPLED)
_TARGET = tl.constexpr(int(NoiseStream.TARGET))
_RIVALS = tl.constexpr(NUM_RUNNER_UPS)
_DRAFT_LOGIT_ERROR = tl.constexpr(DRAFT_LOGIT_ERROR)
_LAST_INT32 = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))
_MINUS_INF_ORDER = tl.constexpr(-2139095041)
"""The result of `ordered` for -inf."""


def put_coupled_topk(
    logprobs: Tensor,
    columns: Tensor,
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
) -> None:
    """Choose the k columns with the largest sum of score and Gumbel noise in each row of a coupled
    session, and write them to `logprobs` and `columns`, best first.

    logprobs: float32 [R, k], receives the log-probs of `coupled_logprobs`. columns: int32 [R, k],
    receives the columns; k <= MAX_TOPK. If a row has fewer columns with finite scores, the rest is
    filled with -inf and -1. Rows of sessions under other rules are not changed. logits: float32 or
    bfloat16 [R, V], columns contiguous. slots: int32 [B], the slots of B sessions with R / B
    consecutive rows each. positions: int32 [R], the position of each row's children. ids: integer
    [V], the target id of each column. Raises InvalidRequestError for other shapes.
    """
    rows, k = columns.shape
    if rows != logits.shape[0] or rows % slots.shape[0] or not 1 <= k <= MAX_TOPK:
        raise InvalidRequestError(
            f"{k} columns of {rows} rows, {logits.shape[0]} rows of logits, {len(slots)} slots",
            reason="KERNEL_SHAPES",
        )
    function = put_coupled_topk_triton if logits.is_cuda else put_coupled_topk_torch
    function(logprobs, columns, logits, state, slots, positions, ids=ids)


def put_coupled_topk_torch(
    logprobs: Tensor,
    columns: Tensor,
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
) -> None:
    """Compute `put_coupled_topk` with PyTorch operators."""
    k = columns.shape[1]
    owners = slots.long().repeat_interleave(logits.shape[0] // len(slots))
    heat = state.temperatures[owners]
    noisy = ((heat > 0) & (state.rules[owners] == RULE_COUPLED)).nonzero()[:, 0]
    if not len(noisy):
        return
    keys = row_keys(state.stream_keys[owners[noisy], NoiseStream.TARGET - 1], positions[noisy])
    scores = scaled_scores(logits[noisy], heat[noisy])
    best, chosen = perturbed_topk(scores, keys, max(k, NUM_RUNNER_UPS), ids.long())
    scored = coupled_logprobs(best, heat[noisy].double())
    logprobs[noisy] = scored[:, :k].nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    columns[noisy] = chosen[:, :k].to(torch.int32)


def put_coupled_topk_triton(
    logprobs: Tensor,
    columns: Tensor,
    logits: Tensor,
    state: SamplingState,
    slots: Tensor,
    positions: Tensor,
    *,
    ids: Tensor,
    tile: int = 1024,
) -> None:
    """Compute `put_coupled_topk` with Triton kernels. tile: number of columns per program, a power
    of two."""
    rows, width = logits.shape
    if rows == 0:
        return
    tiles = cdiv(width, tile)
    keys = torch.empty(rows, tiles * NUM_RUNNER_UPS, dtype=torch.int64, device=logits.device)
    session = (state.temperatures, state.rules, slots)
    rows_per_slot = rows // slots.shape[0]
    _rivals_of_tile[(rows, tiles)](
        logits,
        logits.stride(0),
        width,
        state.stream_keys,
        *session,
        positions,
        ids,
        keys,
        rows_per_slot=rows_per_slot,
        TILE=tile,
        num_warps=4,
    )
    _rivals_of_row[(rows,)](
        *session,
        keys,
        logprobs,
        columns,
        tiles,
        rows_per_slot=rows_per_slot,
        K=columns.shape[1],
        KEYS=next_power_of_2(tiles * NUM_RUNNER_UPS),
        num_warps=8,
    )


@triton.jit
def _rivals_of_tile(
    logits_ptr,
    logits_stride,
    num_columns,
    stream_keys_ptr,
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    keys_ptr,
    rows_per_slot,
    TILE: tl.constexpr,
):
    """Store the columns with the largest sums of score and noise of one tile of one row, as the
    sortable int64 keys of `kernels.drafts.topk`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    temperature = tl.load(temperatures_ptr + slot)
    if (temperature > 0.0) & (tl.load(rules_ptr + slot) == _COUPLED):
        columns = part * TILE + tl.arange(0, TILE)
        valid = columns < num_columns
        scores = scaled_tile(logits_ptr + row * logits_stride, columns, valid, temperature)
        key = noise_key(stream_keys_ptr, slot, _TARGET, tl.load(positions_ptr + row))
        tokens = tl.load(ids_ptr + columns, mask=valid, other=0).to(tl.int32)
        perturbed = scores + gumbel_estimate(noise_bits(key, tokens))
        keys = (ordered(perturbed).to(tl.int64) << 32) + (columns ^ _LAST_INT32).to(tl.int64)
        keys = tl.where(valid & (scores > float("-inf")), keys, _NO_KEY)
        where = (row * tl.num_programs(1) + part) * _RIVALS
        for rank in tl.static_range(_RIVALS):
            best = tl.max(keys, 0)
            tl.store(keys_ptr + where + rank, best)
            keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit
def _rivals_of_row(
    temperatures_ptr,
    rules_ptr,
    slots_ptr,
    keys_ptr,
    logprobs_ptr,
    chosen_ptr,
    tiles,
    rows_per_slot,
    K: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the best columns of all tiles of a row, each with the log-probability that the target
    chooses it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row // rows_per_slot)
    temperature = tl.load(temperatures_ptr + slot)
    if (temperature > 0.0) & (tl.load(rules_ptr + slot) == _COUPLED):
        places = tl.arange(0, KEYS)
        count = tiles * _RIVALS
        keys = tl.load(keys_ptr + row * count + places, mask=places < count, other=_NO_KEY)
        ranks = tl.arange(0, _RIVALS)
        winners = tl.zeros((_RIVALS,), tl.int64) + _NO_KEY
        for rank in tl.static_range(_RIVALS):
            best = tl.max(keys, 0)
            winners = tl.where(ranks == rank, best, winners)
            keys = tl.where(keys == best, _NO_KEY, keys)
        order = (winners >> 32).to(tl.int32)
        there = order > _MINUS_INF_ORDER
        values = (order ^ ((order >> 31) & _LAST_INT32)).to(tl.float32, bitcast=True)
        values = tl.where(there, values, float("-inf"))
        top = tl.max(values, 0)
        gaps = (values - tl.where(top > float("-inf"), top, 0.0)) * (
            temperature / _DRAFT_LOGIT_ERROR
        )
        total = tl.sum(tl.exp(gaps), 0)
        logprobs = tl.where(there, gaps - tl.log(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        columns = (winners & 0x7FFFFFFF).to(tl.int32) ^ _LAST_INT32
        tl.store(logprobs_ptr + row * K + ranks, logprobs, mask=ranks < K)
        tl.store(chosen_ptr + row * K + ranks, tl.where(there, columns, -1), mask=ranks < K)
