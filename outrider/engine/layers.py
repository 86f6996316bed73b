"""Decoder layer of Llama-style models: fused weights, rotary embedding and forward.

Shapes: R rows, H hidden size, Q query heads, G key/value heads, d head dimension.

Rotary embedding rotates pairs of features. Checkpoints keep the two features of a pair d/2 apart;
the model loader makes them neighbours (`interleave_pairs`), so that the rotation is one complex
product. Attention scores do not change, because queries and keys are permuted in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.attention import SegmentPlan
from outrider.engine.heads.layers import rms_norm
from outrider.engine.invariant_segments import InvariantSegmentPlan
from outrider.engine.linear import Linear


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer, fused and packed."""

    input_norm: Tensor
    """Weight of the RMSNorm before attention, [H]."""
    qkv: Linear
    """Fused projection from H to (Q + 2G) * d features. The rotary pairs of queries and keys are
    neighbours."""
    qk_norms: Tensor | None
    """RMSNorm weight of every query and key head, [Q + G, d], or None for models without these
    norms."""
    o_proj: Linear
    post_norm: Tensor
    gate_up: Linear
    """Fused gate and up projections, in this order, from H to 2 * intermediate_size features."""
    down: Linear


def interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder dim 0 (heads * d) so that features i and i + d/2 of each head become neighbours."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rotations(positions_R: Tensor, inv_freq: Tensor, *, num_rotated: int, num_plain: int) -> Tensor:
    """Return the rotary factors, complex64 [R, num_rotated + num_plain, d/2].

    The factors of the first `num_rotated` heads are e^(i * position * frequency), with angles in
    float32. The factors of the last `num_plain` heads, which must not be rotated, are 1. One
    product then covers queries, keys and values.
    """
    angles = positions_R.to(torch.float32)[:, None, None] * inv_freq
    rotated = torch.polar(torch.ones_like(angles), angles).expand(-1, num_rotated, -1)
    plain = rotated.new_ones((rotated.shape[0], num_plain, rotated.shape[-1]))
    return torch.cat((rotated, plain), dim=1)


def rotate(x_RDd: Tensor, rotations_RDp: Tensor) -> Tensor:
    """Multiply neighbouring pairs of features of x [R, heads, d] by rotary factors (see
    `rotations`).

    The product is computed in float32 and returned in x's dtype.
    """
    pairs = torch.view_as_complex(x_RDd.float().view(*x_RDd.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations_RDp).flatten(-2).to(x_RDd.dtype)


@dataclass(slots=True, kw_only=True)
class LayerContext:
    """Inputs that all layers of one forward share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rotations: Tensor
    """Rotary factors, complex64 [R, Q + 2G, d/2]. They are 1 for the value heads."""
    segments: Sequence[SegmentPlan | InvariantSegmentPlan]
    attention_RQd: Tensor
    """Buffer of the attention output [R, Q * d], which every layer overwrites. Rows outside all
    segments stay zero."""


def run_layer(weights: LayerWeights, index: int, x_RH: Tensor, shared: LayerContext) -> Tensor:
    """Run the layer with number `index` on the residual stream x [R, H] and return the new residual
    stream [R, H]."""
    normed = rms_norm(x_RH, weights.input_norm, shared.norm_eps)
    qkv = weights.qkv(normed).view(x_RH.shape[0], -1, shared.head_dim)
    if weights.qk_norms is not None:
        qkv = norm_heads(qkv, weights.qk_norms, shared.norm_eps)
    qkv = rotate(qkv, shared.rotations)
    for plan in shared.segments:
        context = plan.attend(index, qkv[plan.rows], shared.num_heads)
        shared.attention_RQd[plan.rows].view(context.shape).copy_(context)
    x_RH = weights.o_proj.add(shared.attention_RQd, x_RH)
    normed = rms_norm(x_RH, weights.post_norm, shared.norm_eps)
    gate, up = weights.gate_up(normed).chunk(2, dim=-1)
    return weights.down.add(F.silu(gate).mul_(up), x_RH)


def norm_heads(qkv_RDd: Tensor, norms_Dd: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to the query and key heads of qkv, each head with its own weight row."""
    num_normed, dtype = norms_Dd.shape[0], qkv_RDd.dtype
    heads = qkv_RDd[:, :num_normed].float()
    normed = F.rms_norm(heads, heads.shape[-1:], None, eps).to(dtype) * norms_Dd
    return torch.cat((normed, qkv_RDd[:, num_normed:]), dim=1)
