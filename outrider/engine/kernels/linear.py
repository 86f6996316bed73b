"""Matrix products with the norm before them and the activation or residual after them fused in.

M rows of x, N rows of the weight, K features. With few rows a product takes the time of reading
the weight once; `fused_linear` then runs as one kernel that streams the weight through the SMs at
that speed and does the rest beside it. With more rows cuBLAS is ahead, between small kernels.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.linear_configs import (
    MAX_TILES,
    WORKSPACE_FLOATS,
    LinearConfig,
    choose_config,
)
from outrider.engine.kernels.linear_kernel import skinny_kernel
from outrider.engine.kernels.norm import rms_norm, rms_norm_torch, silu_mul
from outrider.engine.kernels.runtime import INTERPRETED, cdiv
from outrider.errors import InternalError, InvalidRequestError

SKINNY_ROWS: Final = 64
"""Products of up to this many rows stream the weight in one kernel; more rows go to cuBLAS."""
SKINNY_NORMED_ROWS: Final = 16
"""The same for products with a norm: with more rows, scaling x in every program costs more than a
kernel of its own (H200: 17.4 us against 19 for 32 rows of an 8B's qkv)."""
_PREFETCH_LINES: Final = 8
"""128-byte lines of each weight row that a program fetches into L2 before its inputs are ready."""
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}


def fused_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Tensor:
    """activation(rms_norm(x) @ weight^T + bias) + residual, rounded once at the end where fused.

    Args:
        x_MK: [M, K] in the weight's dtype.
        weight_NK: [N, K], contiguous along K.
        bias: [N].
        norm_weight: [K]; None: x is not normalised.
        eps: of the RMSNorm (see `norm.rms_norm`).
        residual: [M, N], or [M, N/2] with `gated`.
        gated: rows 0..N/2 of the weight are gate, the others up; the result is silu(gate) * up.
        out_dtype: of the result; None: x's.
        overwrite: the residual's memory may be taken for the result, which saves a copy.

    Returns:
        [M, N], or [M, N/2] with `gated`; a new tensor unless `overwrite`.

    Raises:
        InvalidRequestError: shapes or dtypes do not fit.

    On CUDA the workspace of a device is made by its first product, which must not be under graph
    capture, and serves one stream at a time: products that run side by side would share it.
    """
    _check(x_MK, weight_NK, bias, norm_weight, residual, gated)
    if not x_MK.is_cuda or x_MK.dtype not in _DTYPES:
        run = fused_linear_torch
    elif x_MK.shape[0] <= (SKINNY_ROWS if norm_weight is None else SKINNY_NORMED_ROWS):
        run = fused_linear_triton
    else:
        if overwrite and residual is not None and _adds_in_place(x_MK, residual, bias, gated):
            normed = x_MK if norm_weight is None else rms_norm(x_MK, norm_weight, eps)
            return residual.addmm_(normed, weight_NK.t())
        run = fused_linear_wide
    return run(
        x_MK,
        weight_NK,
        bias=bias,
        norm_weight=norm_weight,
        eps=eps,
        residual=residual,
        gated=gated,
        out_dtype=out_dtype,
    )


def _adds_in_place(x_MK: Tensor, residual: Tensor, bias: Tensor | None, gated: bool) -> bool:
    return bias is None and not gated and residual.dtype == x_MK.dtype


def fused_linear_torch(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`fused_linear` by torch operators, in float32 after the norm (float64 stays)."""
    wide = torch.float64 if x_MK.dtype == torch.float64 else torch.float32
    normed = x_MK if norm_weight is None else rms_norm_torch(x_MK, norm_weight, eps)
    result = F.linear(normed.to(wide), weight_NK.to(wide), None if bias is None else bias.to(wide))
    if gated:
        gate, up = result.chunk(2, dim=1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual
    return result.to(x_MK.dtype if out_dtype is None else out_dtype)


def fused_linear_wide(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`fused_linear` for many rows: norm, cuBLAS product, activation.

    Rounds to x's dtype between the steps. The residual is added within the product where there is
    no bias or activation between them.
    """
    dtype = x_MK.dtype if out_dtype is None else out_dtype
    normed = x_MK if norm_weight is None else rms_norm(x_MK, norm_weight, eps)
    plain = bias is None and not gated
    if plain and residual is not None and residual.dtype == dtype == x_MK.dtype:
        return torch.addmm(residual, normed, weight_NK.t())
    if plain and residual is None and normed.is_cuda and dtype == torch.float32 != x_MK.dtype:
        return torch.mm(normed, weight_NK.t(), out_dtype=dtype)
    result = F.linear(normed, weight_NK, bias)
    if gated:
        result = silu_mul(result)
    if residual is not None:
        result = result + residual
    return result.to(dtype)


def fused_linear_triton(
    x_MK: Tensor,
    weight_NK: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
) -> Tensor:
    """`fused_linear` by the weight-streaming kernel; M <= SKINNY_ROWS.

    The order of every sum is fixed by `config` (None: `choose_config`), so results repeat.

    Raises:
        InvalidRequestError: more rows than SKINNY_ROWS or than the config's tile.
        InternalError: the device's workspace would be made under graph capture, or is too small
            for `config`.
    """
    num_rows, k = x_MK.shape
    n = weight_NK.shape[0]
    if config is None:
        config = choose_config(num_rows, n, k, gated, x_MK.device, x_MK.element_size())
    if num_rows > min(config.block_m, SKINNY_ROWS):
        raise InvalidRequestError(f"{num_rows} rows for a kernel of {config.block_m}")
    if norm_weight is not None and x_MK.dtype == torch.float16:
        # The kernel multiplies x by the norm weight before it divides by the row's size, which
        # may leave float16's range.
        x_MK, norm_weight = rms_norm(x_MK, norm_weight, eps), None
    columns = n // 2 if gated else n
    dtype = x_MK.dtype if out_dtype is None else out_dtype
    out = torch.empty((num_rows, columns), dtype=dtype, device=x_MK.device)
    if out.numel() == 0:
        return out
    tiles = cdiv(columns, config.block_n)
    _launch(
        config,
        tiles,
        x_MK if x_MK.stride(1) == 1 else x_MK.contiguous(),
        weight_NK,
        bias,
        norm_weight,
        residual if residual is None or residual.stride(1) == 1 else residual.contiguous(),
        out,
        gated,
        eps,
    )
    return out


def _launch(
    config: LinearConfig,
    tiles: int,
    x_MK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    eps: float,
) -> None:
    num_rows, k = x_MK.shape
    # Arguments that a variant does not read still need a tensor.
    workspace, counters = out, out
    if config.split_k > 1:
        workspace, counters = _workspace(out.device, config, tiles, gated)
    pdl = config.pdl and not INTERPRETED
    options = {"launch_pdl": True} if pdl else {}
    kernel: Any = skinny_kernel
    kernel[(tiles, config.split_k)](
        x_MK,
        weight_NK,
        out if bias is None else bias,
        out if norm_weight is None else norm_weight,
        out if residual is None else residual,
        out,
        workspace,
        counters,
        num_rows,
        out.shape[1],
        k,
        x_MK.stride(0),
        weight_NK.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm_weight is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_M=config.block_m,
        ROWS=config.tile_rows(gated),
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        EVEN_K=k % config.block_k == 0,
        SWAP=config.swap,
        PDL=pdl,
        LINES=_PREFETCH_LINES,
        LINE=128 // weight_NK.element_size(),
        INTERPRETED=INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **options,
    )


def _workspace(
    device: torch.device, config: LinearConfig, tiles: int, gated: bool
) -> tuple[Tensor, Tensor]:
    """Partial results and zeroed arrival counters: one pair a device, never moved or freed.

    Captured graphs keep their addresses, so the size is fixed.
    """
    if config.workspace_floats(tiles, gated) > WORKSPACE_FLOATS or tiles > MAX_TILES:
        raise InternalError(f"{config} over {tiles} tiles needs more workspace than there is")
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


def _check(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> None:
    if x_MK.ndim != 2 or weight_NK.ndim != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        raise InvalidRequestError(
            f"fused_linear takes x [M, K] and a weight [N, K], got {list(x_MK.shape)} and "
            f"{list(weight_NK.shape)}"
        )
    n, k = weight_NK.shape
    if x_MK.dtype != weight_NK.dtype:
        raise InvalidRequestError(f"x is {x_MK.dtype}, the weight {weight_NK.dtype}: must agree")
    if weight_NK.stride(1) != 1 and k > 1:
        raise InvalidRequestError("the weight must be contiguous along its input features")
    if gated and n % 2:
        raise InvalidRequestError(f"a gated weight has an even number of rows, got {n}")
    columns = n // 2 if gated else n
    for name, tensor, shape in (
        ("bias", bias, (n,)),
        ("norm_weight", norm_weight, (k,)),
        ("residual", residual, (x_MK.shape[0], columns)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise InvalidRequestError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
