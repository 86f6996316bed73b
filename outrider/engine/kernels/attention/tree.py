# pyright: reportCallIssue=false, reportIndexIssue=false
"""Tree attention: the token rows of a round attend to the paged KV cache and to their ancestors.

Shapes: B sessions of the batch bucket, N nodes per session, M = B * N token rows, W KV slots after
the context, Q query heads, G key/value heads, g = Q / G, d head dimension, S slots of the KV pool,
X session slots, T blocks of a block table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.engine.kernels.attention.config import AttentionConfig, choose_config, joined_rows
from outrider.engine.kernels.attention.kernel import attention_kernel, combine_kernel
from outrider.engine.kernels.attention.layout import pool_slots
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InvalidRequestError


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    mask: Tensor | None,
    block_tokens: int,
    positions: Tensor | None,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return attention of each token row to its session's context and to the W KV slots after it,
    [M, Q * d] in q's dtype.

    Token row b * N + j is node j of session b. It attends to every KV slot below context[b], and to
    slot context[b] + w if mask[b, j, w] is not 0. The W slots, and with a window the whole context,
    must hold finite values, even if they are masked. The result of a row that attends to no slot is
    0. Slots past the end of the block table are ignored.

    q: [M, Q, d], each row contiguous. keys, values: [G, S, d] in q's dtype, each head contiguous.
    tables: int32 [X, T], block tables. slots: int32 [B], session slots. context: int32 [B], number
    of KV slots before the session's rows. mask: uint8 [B, N, W], or None for the causal mask w <= j
    with W = N. scale: factor of the scores, 1 / sqrt(d) if None. max_len: upper bound of context +
    W. out: contiguous memory for the result; None for a new tensor.

    window: sliding window: a row ignores slots whose position is at most positions[row] - window. A
    window needs W = N and `positions`, int32 [M], which is not needed otherwise. The position of a
    slot of the context is its index; slot context + w has the position of node w.

    The operands of products have the dtype of the cache; sums are float32. Raises
    InvalidRequestError if shapes or strides do not match, or if queries, a mask or a cache head
    span 2^31 elements or more.
    """
    check_heads(q, keys, values, out, num_rows=slots.shape[0] * num_nodes)
    _check(slots, mask, positions, num_nodes, window)
    launch = tree_attention_triton if q.is_cuda else tree_attention_torch
    return launch(
        q,
        keys,
        values,
        tables=tables,
        slots=slots,
        context=context,
        num_nodes=num_nodes,
        mask=mask,
        block_tokens=block_tokens,
        positions=positions,
        max_len=max_len,
        window=window,
        scale=scale,
        config=config,
        out=out,
    )


def check_heads(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor | None, *, num_rows: int
) -> None:
    """Raise InvalidRequestError if the shapes or strides of queries [M, Q, d], cache [G, S, d] and
    `out` do not match. num_rows: the required M."""
    if q.shape[0] != num_rows or q.shape[1] % keys.shape[0] or q.shape[2] != keys.shape[2]:
        raise InvalidRequestError(
            f"queries {tuple(q.shape)} do not fit {num_rows} rows and a cache of "
            f"{tuple(keys.shape)}"
        )
    dim = keys.shape[2]
    if values.shape != keys.shape or any(x.stride()[1:] != (dim, 1) for x in (q, keys, values)):
        raise InvalidRequestError(
            "keys and values must agree; their heads and rows of q contiguous"
        )
    if keys.shape[1] * dim >= 2**31:
        raise InvalidRequestError("a head of the cache must have fewer than 2^31 elements")
    if q.shape[0] * q.stride(0) >= 2**31:
        raise InvalidRequestError("queries must span fewer than 2^31 elements")
    if out is not None and (not out.is_contiguous() or out.shape != (len(q), q.shape[1:].numel())):
        raise InvalidRequestError(f"attention of {tuple(q.shape)} into {tuple(out.shape)}")


def _check(
    slots: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    num_nodes: int,
    window: int | None,
) -> None:
    batch = slots.shape[0]
    if mask is not None and mask.numel() >= 2**31:
        raise InvalidRequestError("the mask must span fewer than 2^31 elements")
    if mask is not None and (
        mask.ndim != 3 or mask.shape[:2] != (batch, num_nodes) or not mask.shape[2]
    ):
        raise InvalidRequestError(f"mask {tuple(mask.shape)} for {batch} x {num_nodes} nodes")
    if window is None:
        return
    if positions is None or (mask is not None and mask.shape[2] != num_nodes):
        raise InvalidRequestError("a window needs the positions, and one mask column per node")


def tree_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    mask: Tensor | None,
    block_tokens: int,
    positions: Tensor | None,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `tree_attention` with PyTorch operators; `config` is ignored."""
    batch, (num_rows, num_heads, dim) = slots.shape[0], q.shape
    num_kv_heads, factor = keys.shape[0], dim**-0.5 if scale is None else scale
    if mask is None:
        mask = torch.ones((num_nodes, num_nodes), dtype=torch.uint8, device=q.device)
        mask = mask.tril_().expand(batch, -1, -1)
    width = mask.shape[2]
    index = torch.arange(min(max_len, tables.shape[1] * block_tokens), device=q.device)
    index_BL = index.expand(batch, -1)
    after_BL = index - context[:, None]
    column_BL = after_BL.clamp(0, width - 1).long()
    drafted = mask.bool().gather(2, column_BL[:, None].expand(-1, num_nodes, -1))
    seen_BNL = torch.where((after_BL < 0)[:, None], True, drafted & (after_BL < width)[:, None])
    if window is not None:
        assert positions is not None
        rows_BN = positions.view(batch, num_nodes)
        place_BL = torch.where(after_BL < 0, index_BL, rows_BN.gather(1, column_BL))
        seen_BNL = seen_BNL & (place_BL[:, None] > rows_BN[:, :, None] - window)
    pool_BL = pool_slots(tables, slots, index_BL, block_tokens)
    k_GBLd, v_GBLd = keys[:, pool_BL].float(), values[:, pool_BL].float()
    # A weight of zero does not hide a NaN.
    v_GBLd = v_GBLd.masked_fill((after_BL >= width)[:, :, None], 0.0)
    q_GBNgd = q.float().view(batch, num_nodes, num_kv_heads, -1, dim).permute(2, 0, 1, 3, 4)
    scores = torch.einsum("hbngd,hbld->hbngl", q_GBNgd, k_GBLd) * factor
    scores = scores.masked_fill(~seen_BNL[None, :, :, None], -math.inf)
    blind_BN1 = ~seen_BNL.any(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(blind_BN1[None, :, :, None], 0.0)
    result = torch.einsum("hbngl,hbld->bnhgd", weights, v_GBLd)
    result = result.reshape(num_rows, num_heads * dim).to(q.dtype)
    return result if out is None else out.copy_(result)


def tree_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    mask: Tensor | None,
    block_tokens: int,
    positions: Tensor | None,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `tree_attention` with one Triton kernel, or with two if the context is split."""
    (num_rows, num_heads, dim), num_kv_heads = q.shape, keys.shape[0]
    config = config or choose_config(
        batch=slots.shape[0],
        num_nodes=num_nodes,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        itemsize=keys.element_size(),
        max_len=max_len,
        causal=mask is None,
    )
    group, splits = num_heads // num_kv_heads, config.splits
    dims = max(next_power_of_2(dim), 16)
    if out is None:
        out = torch.empty((num_rows, num_heads * dim), dtype=q.dtype, device=q.device)
    partial, stats = out, out
    if splits > 1:
        shape = (num_rows, num_heads, splits, dim)
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
        stats = torch.empty(shape[:3], dtype=torch.float32, device=q.device)
    mask_bits = 0
    if mask is not None:
        mask = mask.contiguous()
        mask_bits = next_power_of_2(mask.shape[2]) if mask.shape[2] <= 128 else 0
    tiles = cdiv(num_nodes * group, config.block_rows)
    attention_kernel[(tiles * num_kv_heads, splits, slots.shape[0])](
        q,
        keys,
        values,
        tables,
        slots,
        context,
        q if mask is None else mask,
        context if positions is None else positions,
        partial,
        stats,
        q.stride(0),
        keys.stride(0),
        values.stride(0),
        tables.stride(0),
        tables.shape[1] * block_tokens,
        (dim**-0.5 if scale is None else scale) * math.log2(math.e),
        num_nodes,
        num_nodes if mask is None else mask.shape[2],
        splits,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        DIMS=dims,
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=config.block_rows,
        BLOCK_SLOTS=config.block_slots,
        SINGLE=splits == 1,
        MASKED=mask is not None,
        MASK_BITS=mask_bits,
        WINDOW=0 if window is None else window,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        joined = joined_rows(num_rows * num_heads, splits)
        combine_kernel[(cdiv(num_rows * num_heads, joined),)](
            partial,
            stats,
            out,
            num_rows * num_heads,
            splits,
            ROWS=joined,
            BLOCK_SPLITS=next_power_of_2(splits),
            DIM=dim,
            DIMS=dims,
            num_warps=4,
        )
    return out
