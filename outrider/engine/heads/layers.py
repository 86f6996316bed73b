"""Building blocks of draft heads: RMSNorm, rotary embedding, the pluggable linear factory.

Shapes: N rows, H hidden size, hd head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.checkpoints.head_config import HeadConfig

Linear = Callable[[Tensor], Tensor]


class LinearFactory(Protocol):
    """Builds a callable that computes `x @ weight.T + bias`. It may store the weight in another
    memory layout (packed)."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x over its last dimension. It is computed in float32, or in float64 if x is
    float64. The result is cast to the dtype of x before it is multiplied by `weight`."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


def rope_inverse_frequencies(config: HeadConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the inverse frequencies of RoPE, float32 [hd/2], with the config's `rope_scaling`
    applied."""
    return scaled_inverse_frequencies(
        config.head_dim, config.rope_theta, config.rope_scaling, device
    )


def scaled_inverse_frequencies(
    head_dim: int, theta: float, scaling: dict[str, Any] | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the inverse frequencies of RoPE, float32 [hd/2], for the `rope_scaling` of a model
    config: type `linear` or `llama3`, or None for no scaling."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    inv_freq = 1.0 / (theta ** (steps / head_dim))
    if scaling is None:
        return inv_freq
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return inv_freq / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    old_len = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = ((old_len / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def rotary_tables(
    positions_N: Tensor, inv_freq: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for `apply_rotary`, each [N, 1, hd]. Angles are computed in
    float32."""
    angles = positions_N.to(torch.float32)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x_NDh: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [N, heads, hd] with rotate-half RoPE applied."""
    half = x_NDh.shape[-1] // 2
    rotated = torch.cat((-x_NDh[..., half:], x_NDh[..., :half]), dim=-1)
    return x_NDh * cos + rotated * sin
