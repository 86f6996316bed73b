"""Launch of the weight-streaming kernel, and the workspace of split-K products.

Shapes: M rows of x, N rows of the weight, K features, C output columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.kernels.linear.configs import MAX_TILES, WORKSPACE_FLOATS, LinearConfig
from outrider.engine.kernels.linear.kernel import skinny_kernel
from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InternalError

_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


class NormIn(NamedTuple):
    """Inputs with which a product completes an RMSNorm whose weight x is already multiplied by."""

    squares: Tensor
    """float32 [P, M]: sums of x^2 over each of P parts of a row."""
    eps: float


class NormOut(NamedTuple):
    """Weight of the RMSNorm that follows the product, and memory for the first half of that norm
    (see `fused.HalfNormed`)."""

    weight: Tensor
    """[C]: weight of the norm."""
    scaled: Tensor
    """[M, C]: receives result * weight."""
    squares: Tensor
    """float32 [tiles, M]: receives the sum of squares of each tile of a row."""


class RotaryOut(NamedTuple):
    """Arguments for a QKV product that applies RoPE and writes keys and values to the KV cache; see
    `rotary.rotary_write`.

    The weight's rows are the query heads, then the key heads, then the value heads. A tile of
    columns must lie within one head. The product's `out` receives only the query heads.
    """

    table: Tensor
    """float32 [M, 2, d/2]: cosines and sines, see `rotary.rotary_table`."""
    write_slots: Tensor
    """int64 [M]: slot of the KV pool of each row; -1 for rows that are not written."""
    keys: Tensor
    """[G, S, d]: key cache, each head contiguous."""
    values: Tensor
    """[G, S, d]: value cache, each head contiguous."""
    num_heads: int
    """Number of query heads."""


def launch_skinny(
    config: LinearConfig,
    x_MK: Tensor,
    weight_NK: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    norm_in: NormIn | None,
    norm_out: NormOut | None,
    rotary: RotaryOut | None,
    rounded: bool = False,
) -> None:
    """Launch `skinny_kernel`.

    out: [M, C], or the query heads [M, Q * d] with `rotary`. x, weight and residual are contiguous
    along their columns. More rows than config.block_m are allowed only without split K, `norm_in`
    and `norm_out`. Raises InternalError if this is violated, if `rotary` is combined with a
    residual, `gated` or `norm_out`, or if the workspace is too small or does not exist during graph
    capture.
    """
    if rotary is not None and (residual is not None or gated or norm_out is not None):
        raise InternalError("a rotated product takes no residual, gate or norm after it")
    num_rows, k = x_MK.shape
    row_tiles = cdiv(num_rows, config.block_m)
    if row_tiles > 1 and (config.split_k > 1 or norm_in is not None or norm_out is not None):
        raise InternalError(f"{num_rows} rows in several tiles with a split K or half a norm")
    columns = weight_NK.shape[0] // 2 if gated else weight_NK.shape[0]
    tiles = cdiv(columns, config.block_n)
    # Arguments that a variant does not read still need a tensor.
    workspace, counters = out, out
    if config.split_k > 1:
        if config.workspace_floats(tiles, gated) > WORKSPACE_FLOATS or tiles > MAX_TILES:
            raise InternalError(f"{config} over {tiles} tiles needs more workspace than there is")
        workspace, counters = product_workspace(out.device)
    parts = 1 if norm_in is None else norm_in.squares.shape[0]
    kernel: Any = skinny_kernel
    kernel[(tiles * row_tiles, config.split_k)](
        x_MK,
        weight_NK,
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        workspace,
        counters,
        out if norm_in is None else norm_in.squares,
        *((out, out, out) if norm_out is None else norm_out),
        out if rotary is None else rotary.table,
        out if rotary is None else rotary.write_slots,
        out if rotary is None else rotary.keys,
        out if rotary is None else rotary.values,
        num_rows,
        columns,
        k,
        parts,
        x_MK.stride(0),
        weight_NK.stride(0),
        0 if residual is None else residual.stride(0),
        0 if rotary is None else rotary.keys.stride(0),
        0 if rotary is None else rotary.values.stride(0),
        0.0 if norm_in is None else norm_in.eps,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        NORM_IN=norm_in is not None,
        NORM_OUT=norm_out is not None,
        ROTARY=rotary is not None,
        QUERY_HEADS=0 if rotary is None else rotary.num_heads,
        KV_HEADS=0 if rotary is None else rotary.keys.shape[0],
        DIM=1 if rotary is None else rotary.keys.shape[2],
        BLOCK_PARTS=next_power_of_2(parts),
        BLOCK_M=config.block_m,
        ROWS=config.tile_rows(gated),
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EVEN_K=k % config.block_k == 0,
        SWAP=config.swap,
        ROUNDED=rounded,
        SEVERAL=row_tiles > 1,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def product_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the workspace of a device for split-K products: memory for partial sums, and arrival
    counters, initially 0.

    Captured graphs contain the addresses, so the workspace is never moved, resized or freed. Raises
    InternalError if it does not exist yet during graph capture.
    """
    pair = _workspaces.get(device)
    if pair is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InternalError("run a product once before a graph is captured: see fused_linear")
        pair = (
            torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )
        _workspaces[device] = pair
    return pair
