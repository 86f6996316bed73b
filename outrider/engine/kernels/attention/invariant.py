# pyright: reportCallIssue=false, reportIndexIssue=false
"""Batch-invariant attention over the paged KV cache: the result of a row does not depend on other
rows.

Shapes: B sessions of the batch bucket, N nodes per session, M = B * N token rows, Q query heads, G
key/value heads, g = Q / G, d head dimension, S KV slots of the pool, X session slots, T blocks of a
block table, D entries of a path.

A row at position p attends to the positions 0 to p of its own path: the context, then the nodes
from the root to itself. The result is defined by these positions alone. It is therefore the same,
bit for bit, for a decoding row, a node of a chain or of a tree, and a row of a prompt, in any
batch:

* Positions are cut into KV tiles of 64 at multiples of 64. A tile has its own maximum m of the
  scores, weights exp((s - m) * scale) rounded to the cache's dtype, their sum, and the weighted sum
  of the values, which starts from zero.
* Eight consecutive tiles (512 positions) form a split. The tiles of a split are joined from left to
  right, and then the splits, with the online softmax of Milakov and Gimelshein (2018). Joining
  positions after p changes no bit of the result.

Splits of a fixed length write more partial results than splits whose number depends on the load, as
in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.attention.config import SM_COUNT
from outrider.engine.kernels.attention.invariant_kernel import (
    SPLIT_TILES,
    TILE_SLOTS,
    joining_kernel,
    shared_tiles_kernel,
)
from outrider.engine.kernels.attention.tree import check_heads, tree_attention_torch
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InvalidRequestError

_MAX_TILE_PARTS = 32
"""Maximum number of KV tiles whose results are stored one by one. With more tiles, the tiles of a
split are joined before the result is stored."""
_SINGLE_PROGRAMS = 64
"""Number of tiles of query rows from which one program per tile is faster than several programs
per tile and a second kernel."""


class InvariantConfig(NamedTuple):
    """Launch parameters of `invariant_attention`. None of them changes a result."""

    block_rows: int
    """Number of query rows of a program: a power of two, at least 16."""
    programs: int
    """Number of programs that share the context of a session; 0 for one program per tile of query
    rows, without a second kernel."""
    num_warps: int
    num_stages: int
    max_parts: int = _MAX_TILE_PARTS


def choose_invariant_config(
    *, batch: int, num_nodes: int, num_heads: int, num_kv_heads: int, max_len: int, tree: bool
) -> InvariantConfig:
    """Return the launch parameters for a shape. max_len: longest context that a session may have.
    tree: whether the rows form trees."""
    rows = num_nodes * (num_heads // num_kv_heads)
    block_rows = min(max(next_power_of_2(rows), 16), 64)
    base = batch * num_kv_heads * cdiv(rows, block_rows)
    while not tree and base < SM_COUNT and block_rows > 16:
        block_rows //= 2
        base = batch * num_kv_heads * cdiv(rows, block_rows)
    if base >= _SINGLE_PROGRAMS and not tree:
        return InvariantConfig(block_rows, 0, 4, 2 if block_rows == 64 else 3)
    wanted = cdiv(SM_COUNT * (1 if tree else 3), base)
    programs = min(max(wanted, 4), cdiv(max_len, TILE_SLOTS.value))
    return InvariantConfig(block_rows, programs, 4, 2 if block_rows == 64 else 3)


def invariant_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    positions: Tensor,
    paths: Tensor | None,
    block_tokens: int,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: InvariantConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute attention of each token row to its session's context and its own path.

    Token row b * N + j is node j of session b. It attends to the KV slots 0 to context[b] - 1, and
    to its path: the slots context[b] + paths[b, j, e] for each e up to the depth of the node, or,
    if `paths` is None, the slots context[b] to context[b] + j. All slots up to context[b] + N must
    hold finite values. Slots past the end of the block table are ignored.

    Args:
        q: [M, Q, d], each row contiguous.
        keys, values: [G, S, d] in q's dtype, each head contiguous.
        tables: int32 [X, T]: block table of each session slot.
        slots: int32 [B]: session slot of each session.
        context: int32 [B]: number of KV slots before the session's rows.
        positions: int32 [M]: context[b] plus the depth of the row's node.
        paths: int32 [B, N, D]: nodes from the root to the row's node; None for chains.
        max_len: upper bound of context[b] + N.
        window: sliding window: a row ignores positions <= positions[row] - window.
        scale: positive factor of the scores; None for 1 / sqrt(d).
        out: contiguous memory for the result; None for a new tensor.

    Returns:
        [M, Q * d] in q's dtype.

    Raises:
        InvalidRequestError: shapes, strides or the scale do not fit.
    """
    batch = slots.shape[0]
    check_heads(q, keys, values, out, num_rows=batch * num_nodes)
    if positions.shape != q.shape[:1]:
        raise InvalidRequestError(f"positions {tuple(positions.shape)} for {len(q)} rows")
    if paths is not None and (paths.shape[:2] != (batch, num_nodes) or not paths.is_contiguous()):
        raise InvalidRequestError(f"paths {tuple(paths.shape)} for {batch} x {num_nodes} nodes")
    if scale is not None and not scale > 0:
        raise InvalidRequestError(f"the scale of the scores must be positive, got {scale}")
    launch = invariant_attention_triton if q.is_cuda else invariant_attention_torch
    return launch(
        q,
        keys,
        values,
        tables=tables,
        slots=slots,
        context=context,
        num_nodes=num_nodes,
        positions=positions,
        paths=paths,
        block_tokens=block_tokens,
        max_len=max_len,
        window=window,
        scale=scale,
        config=config,
        out=out,
    )


def invariant_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    positions: Tensor,
    paths: Tensor | None,
    block_tokens: int,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: InvariantConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `invariant_attention` with PyTorch operators, equal up to rounding. `config` is
    ignored."""
    return tree_attention_torch(
        q,
        keys,
        values,
        tables=tables,
        slots=slots,
        context=context,
        num_nodes=num_nodes,
        mask=None if paths is None else _mask_of_paths(paths, positions, context),
        block_tokens=block_tokens,
        positions=positions,
        max_len=max_len,
        window=window,
        scale=scale,
        out=out,
    )


def invariant_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    tables: Tensor,
    slots: Tensor,
    context: Tensor,
    num_nodes: int,
    positions: Tensor,
    paths: Tensor | None,
    block_tokens: int,
    max_len: int,
    window: int | None = None,
    scale: float | None = None,
    config: InvariantConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `invariant_attention` with one Triton kernel, or with two if several programs share
    the context of a session."""
    (num_rows, num_heads, dim), num_kv_heads = q.shape, keys.shape[0]
    config = config or choose_invariant_config(
        batch=slots.shape[0],
        num_nodes=num_nodes,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_len=max_len,
        tree=paths is not None,
    )
    if paths is not None and not config.programs:
        raise InvalidRequestError("the rows of trees need the second kernel: programs must be > 0")
    if out is None:
        out = torch.empty((num_rows, num_heads * dim), dtype=q.dtype, device=q.device)
    group, single = num_heads // num_kv_heads, not config.programs
    table_slots = tables.shape[1] * block_tokens
    parts, stats, allocated = out, out, 1
    if not single:
        num_tiles = cdiv(min(max_len, table_slots), TILE_SLOTS.value)
        allocated = max(min(num_tiles, config.max_parts), cdiv(num_tiles, SPLIT_TILES.value) + 1)
        shape = (num_rows, num_heads, allocated)
        parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
        stats = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    dims = max(next_power_of_2(dim), 16)
    shared = {
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "DIM": dim,
        "DIMS": dims,
        "BLOCK_TOKENS": block_tokens,
        "TREE": paths is not None,
        "WINDOW": 0 if window is None else window,
    }
    factor = (dim**-0.5 if scale is None else scale) * math.log2(math.e)
    strides = (q.stride(0), keys.stride(0), values.stride(0), tables.stride(0), table_slots)
    row_tiles = cdiv(num_nodes * group, config.block_rows)
    shared_tiles_kernel[(row_tiles * num_kv_heads, max(config.programs, 1), slots.shape[0])](
        q,
        keys,
        values,
        tables,
        slots,
        context,
        positions,
        parts,
        stats,
        *strides,
        factor,
        num_nodes,
        config.max_parts,
        allocated,
        BLOCK_ROWS=config.block_rows,
        SINGLE=single,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **shared,
    )
    if not single:
        # The heads of a group share what a tree's row reads; those of a chain share nothing.
        heads = 1 if paths is None else group
        joining_kernel[(num_rows, num_heads // heads)](
            q,
            keys,
            values,
            tables,
            slots,
            context,
            positions,
            positions if paths is None else paths,
            parts,
            stats,
            out,
            *strides,
            factor,
            num_nodes,
            0 if paths is None else paths.shape[2],
            config.max_parts,
            allocated,
            HEADS=heads,
            MEMBERS=1 if paths is None else max(next_power_of_2(group), 16),
            num_warps=1 if paths is None else 4,
            **shared,
        )
    return out


def _mask_of_paths(paths: Tensor, positions: Tensor, context: Tensor) -> Tensor:
    """Return bool [B, N, N]: entry (b, j, w) says whether node w is on the path of node j."""
    batch, num_nodes, entries = paths.shape
    depth = positions.view(batch, num_nodes) - context[:, None]
    there = torch.arange(entries, device=paths.device) <= depth[:, :, None]
    mask = torch.zeros((batch, num_nodes, num_nodes), dtype=torch.uint8, device=paths.device)
    return mask.scatter_add_(2, torch.where(there, paths, 0).long(), there.to(torch.uint8)).ne(0)
