"""RMSNorm and gated SiLU kernels for matrix products that do not fuse them.

Shapes: M rows, K features, I intermediate size.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# pyright: reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.runtime import cdiv, next_power_of_2
from outrider.errors import InvalidRequestError

_SILU_BLOCK = 1024
"""Number of output columns per program of the activation."""


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x) = x / sqrt(mean(x^2) + eps) * weight for every row (Zhang and Sennrich
    2019), in x's shape and dtype.

    Mean and quotient are computed in float32, or in float64 if x is float64. The quotient is
    rounded to x's dtype before it is multiplied by `weight`, as in the reference code of the
    models. Raises InvalidRequestError if x is not [M, K] or weight is not [K].
    """
    _check_norm(x_MK, weight_K)
    if x_MK.is_cuda and x_MK.dtype != torch.float64:
        return rms_norm_triton(x_MK, weight_K, eps)
    return rms_norm_torch(x_MK, weight_K, eps)


def rms_norm_torch(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` with PyTorch operators."""
    wide = x_MK if x_MK.dtype == torch.float64 else x_MK.float()
    normed = F.rms_norm(wide, weight_K.shape, None, eps).to(x_MK.dtype)
    return (normed * weight_K).to(x_MK.dtype)


def rms_norm_triton(x_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` with one Triton kernel, one program per row."""
    num_rows, num_features = x_MK.shape
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    out_MK = torch.empty((num_rows, num_features), dtype=x_MK.dtype, device=x_MK.device)
    if num_rows == 0:
        return out_MK
    block = next_power_of_2(num_features)
    _rms_norm_kernel[(num_rows,)](
        x_MK,
        weight_K.contiguous(),
        out_MK,
        num_features,
        x_MK.stride(0),
        eps,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out_MK


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [M, I] in the dtype of the input.

    gate_up: [M, 2I], whose first I columns are `gate` and whose last I columns are `up`. The result
    is computed in float32, or in float64 if the input is float64, and rounded once. Raises
    InvalidRequestError if the input is not [M, 2I].
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise InvalidRequestError(f"silu_mul takes [M, 2I], got {list(gate_up.shape)}")
    if gate_up.is_cuda and gate_up.dtype != torch.float64:
        return silu_mul_triton(gate_up)
    return silu_mul_torch(gate_up)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    """Compute `silu_mul` with PyTorch operators."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """Compute `silu_mul` with one Triton kernel, one program per row and block of columns."""
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out_MI = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if out_MI.numel() == 0:
        return out_MI
    _silu_mul_kernel[(num_rows, cdiv(num_columns, _SILU_BLOCK))](
        gate_up, out_MI, num_columns, gate_up.stride(0), BLOCK=_SILU_BLOCK, num_warps=4
    )
    return out_MI


def _check_norm(x_MK: Tensor, weight_K: Tensor) -> None:
    if x_MK.ndim != 2 or weight_K.shape != x_MK.shape[1:]:
        raise InvalidRequestError(
            f"rms_norm takes [M, K] and a weight [K], got {list(x_MK.shape)} and "
            f"{list(weight_K.shape)}"
        )


@triton.jit
def _rms_norm_kernel(x, weight, out, num_features, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_features
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, axis=0) / num_features
    normed = (values * tl.rsqrt(mean_square + eps)).to(out.dtype.element_ty).to(tl.float32)
    result = (normed * scale).to(out.dtype.element_ty)
    tl.store(out + row * num_features + columns, result, mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, num_columns, in_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    gate_at = gate_up + row * in_stride + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + num_columns, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * num_columns + columns, result.to(out.dtype.element_ty), mask=inside)
