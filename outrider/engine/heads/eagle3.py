"""EAGLE-3 draft head.

Shapes: N rows, H hidden size, nq query heads, nkv key/value heads, hd head dimension, Vd draft
vocabulary size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.heads.layers import (
    Linear,
    apply_rotary,
    rms_norm,
    rope_inverse_frequencies,
    rotary_tables,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """Weights of the single transformer block, as callables made by a `LinearFactory`."""

    qkv: tuple[Linear, Linear]
    """Query projection, and fused key and value projection (key rows first)."""
    o_proj: Linear
    gate_up: Linear
    """Gate and up projections of the SwiGLU MLP, gate rows first."""
    down: Linear
    post_norm: Tensor


class HeadBlock:
    """The transformer block (attention projections and MLP) of `EagleHead` and `Eagle3Head`."""

    def __init__(self, config: HeadConfig, block: BlockWeights, device: torch.device) -> None:
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self.weights = block
        self.inverse_frequencies = rope_inverse_frequencies(config, device)

    def kv(self, inputs: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys with RoPE applied, and values without, each [N, nkv, hd]."""
        _, num_kv, head_dim = self._heads
        kv = self.weights.qkv[1](inputs).view(-1, 2 * num_kv, head_dim)
        cos, sin = rotary_tables(positions_N, self.inverse_frequencies, kv.dtype)
        return apply_rotary(kv[:, :num_kv], cos, sin), kv[:, num_kv:]

    def query(self, inputs: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries [N, nq, hd] with RoPE applied."""
        num_heads, _, head_dim = self._heads
        q = self.weights.qkv[0](inputs).view(-1, num_heads, head_dim)
        cos, sin = rotary_tables(positions_N, self.inverse_frequencies, q.dtype)
        return apply_rotary(q, cos, sin)

    def finish(self, residual_NH: Tensor, attn_out_NQh: Tensor) -> Tensor:
        """Return x [N, H], where h = residual + o_proj(attention) and x = h + MLP(norm(h))."""
        h = residual_NH + self.weights.o_proj(attn_out_NQh.flatten(1))
        gate, up = self.weights.gate_up(rms_norm(h, self.weights.post_norm, self._eps)).chunk(2, -1)
        return h + self.weights.down(F.silu(gate) * up)


class Eagle3Head:
    """EAGLE-3 head: one transformer block over [RMSNorm(embedding); RMSNorm(feature)], with a draft
    vocabulary that may be smaller than the target's."""

    def __init__(
        self,
        config: HeadConfig,
        block: BlockWeights,
        *,
        fingerprint: str,
        embedding: Tensor,
        input_norm: Tensor,
        hidden_norm: Tensor,
        final_norm: Tensor,
        lm_head: Linear,
        target_ids: Tensor,
    ) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.target_ids = target_ids
        self.embedding = embedding
        self.input_norm = input_norm
        self.hidden_norm = hidden_norm
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.block = HeadBlock(config, block, embedding.device)

    def inputs(self, token_ids_N: Tensor, features_NH: Tensor) -> Tensor:
        """Return [RMSNorm(embedding); RMSNorm(feature)], [N, 2H]."""
        eps = self.config.rms_norm_eps
        embedded = rms_norm(F.embedding(token_ids_N, self.embedding), self.input_norm, eps)
        return torch.cat((embedded, rms_norm(features_NH, self.hidden_norm, eps)), dim=-1)

    def residual(self, inputs: Tensor, features_NH: Tensor) -> Tensor:
        """Return the features [N, H], or their normalised values from `inputs` if the config sets
        `norm_before_residual`."""
        if self.config.norm_before_residual:
            return inputs[:, self.config.hidden_size :]
        return features_NH

    def kv(self, inputs: Tensor, features_NH: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys with RoPE applied, and values without, each [N, nkv, hd]."""
        return self.block.kv(inputs, positions_N)

    def query(self, inputs: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries [N, nq, hd] with RoPE applied."""
        return self.block.query(inputs, positions_N)

    def finish(self, residual_NH: Tensor, attn_out_NQh: Tensor) -> Tensor:
        """Return x [N, H], with the final norm applied if the config sets `norm_output`."""
        x = self.block.finish(residual_NH, attn_out_NQh)
        if self.config.norm_output:
            return rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        return x

    def logits(self, x_NH: Tensor) -> Tensor:
        """Return float32 draft logits [N, Vd]."""
        if not self.config.norm_output:
            x_NH = rms_norm(x_NH, self.final_norm, self.config.rms_norm_eps)
        return self.lm_head(x_NH).float()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft token ids, a tensor of any shape, to target token ids."""
        return self.target_ids[draft_ids]
