"""Frozen target model for training: a minimal forward of Llama-style models.

Shapes: B rows, S positions, H hidden size, nq query heads, nkv key/value heads, hd head dimension,
V vocabulary size, L cached length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.checkpoints.model_tensors import EMBEDDING, FINAL_NORM_WEIGHT, LM_HEAD
from outrider.engine.checkpoint import load_model_config, open_checkpoint
from outrider.engine.heads.layers import rms_norm, scaled_inverse_frequencies

_MODEL_TYPES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Configuration of a target model, from its config.json."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


class TargetLayer(NamedTuple):
    """Weights of one layer. The q, k and v projections are one tensor, gate and up another."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o_proj: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: (layer index, q [B, S, nq, hd], k [B, S, nkv, hd], v like k) -> attention
output [B, S, nq, hd]."""


class TrainingTarget:
    """Frozen weights of a target model, and its forward pass."""

    def __init__(
        self,
        config: TargetConfig,
        embedding: Tensor,
        layers: list[TargetLayer],
        norm: Tensor,
        lm_head: Tensor,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.lm_head = lm_head
        self.inv_freq = scaled_inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, embedding.device
        )
        self._before: Callable[..., tuple[Tensor, Tensor, Tensor]] = _before_attention
        self._after: Callable[..., Tensor] = _after_attention

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    def compiled(self) -> TrainingTarget:
        """Return a copy with the same weights whose operations before and after attention are
        compiled by torch.compile for fixed shapes."""
        other = TrainingTarget(self.config, self.embedding, self.layers, self.norm, self.lm_head)
        other._before = torch.compile(_before_attention, dynamic=False)
        other._after = torch.compile(_after_attention, dynamic=False)
        return other

    def run_layers(
        self, x: Tensor, positions: Tensor, attend: Attend, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers over x [B, S, H]. Return the output of the last layer, and that of each
        layer with an index in `taps`."""
        cos, sin = rotary(positions, self.inv_freq, x.dtype)
        recorded = {}
        c = self.config
        heads = (c.num_heads, c.num_kv_heads, c.head_dim)
        for index, layer in enumerate(self.layers):
            q, k, v = self._before(x, layer, cos, sin, heads, c.rms_norm_eps)
            x = self._after(x, attend(index, q, k, v), layer, c.rms_norm_eps)
            if index in taps:
                recorded[index] = x
        return x, [recorded[t] for t in taps]

    def forward(
        self, ids_BS: Tensor, positions_BS: Tensor, mask_BSS: Tensor, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states after the final norm, [B, S, H], and the concatenated outputs of
        the layers with an index in `taps`, [B, S, len(taps) * H]."""
        mask = mask_BSS[:, None]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return masked_attention(q, k, v, mask)

        x, recorded = self.run_layers(
            F.embedding(ids_BS, self.embedding), positions_BS, attend, taps
        )
        return self.final_norm(x), torch.cat(recorded, dim=-1) if recorded else x[..., :0]

    def final_norm(self, x: Tensor) -> Tensor:
        """Apply the norm before the lm_head."""
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [..., V] in the compute dtype."""
        return F.linear(normed, self.lm_head)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute scaled dot-product attention of q [B,S,nq,hd] over k, v [B,L,nkv,hd] under a boolean
    mask [B,1,S,L]."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.transpose(1, 2).repeat_interleave(group, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)


def rotary(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines for `rotate`, each [..., 1, hd], for positions [...]."""
    angles = positions.to(torch.float32)[..., None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotate-half RoPE to x [..., heads, hd]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _before_attention(
    x: Tensor,
    layer: TargetLayer,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_q, num_kv, head_dim = heads
    fused = F.linear(rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
    fused = fused.view(*x.shape[:-1], num_q + 2 * num_kv, head_dim)
    q, k = fused[..., :num_q, :], fused[..., num_q : num_q + num_kv, :]
    return rotate(q, cos, sin), rotate(k, cos, sin), fused[..., num_q + num_kv :, :]


def _after_attention(x: Tensor, attn: Tensor, layer: TargetLayer, eps: float) -> Tensor:
    x = x + F.linear(attn.flatten(-2), layer.o_proj)
    gate, up = F.linear(rms_norm(x, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer.down)


def load_target(
    path: str | Path, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> TrainingTarget:
    """Load a Llama-style model from a directory with config.json and safetensors files.

    Raises ValueError for models that are not supported in training, and InvalidRequestError or
    NotFoundError for checkpoints that cannot be served.
    """
    directory = Path(path)
    config = load_target_config(directory)
    source = open_checkpoint(directory)
    served = load_model_config(directory)
    if served.o_bias or served.mlp_bias:
        raise ValueError("biases of o_proj and of the MLP are not supported in training")

    def get(name: str) -> Tensor:
        return source.get(name).to(device=device, dtype=dtype)

    embedding = get(EMBEDDING)
    return TrainingTarget(
        config,
        embedding,
        [_load_layer(get, served.qkv_bias, f"model.layers.{i}.") for i in range(config.num_layers)],
        get(FINAL_NORM_WEIGHT),
        embedding if served.tie_word_embeddings else get(LM_HEAD),
    )


def _load_layer(get: Callable[[str], Tensor], has_bias: bool, prefix: str) -> TargetLayer:
    def fused(part: str, kinds: tuple[str, ...], what: str = "weight") -> Tensor:
        return torch.cat([get(f"{prefix}{part}.{kind}.{what}") for kind in kinds])

    qkv = ("q_proj", "k_proj", "v_proj")
    return TargetLayer(
        input_norm=get(prefix + "input_layernorm.weight"),
        qkv=fused("self_attn", qkv),
        qkv_bias=fused("self_attn", qkv, "bias") if has_bias else None,
        o_proj=get(prefix + "self_attn.o_proj.weight"),
        post_norm=get(prefix + "post_attention_layernorm.weight"),
        gate_up=fused("mlp", ("gate_proj", "up_proj")),
        down=get(prefix + "mlp.down_proj.weight"),
    )


def load_target_config(directory: Path) -> TargetConfig:
    """Read the target's config.json. Raises ValueError for unsupported model types and rope
    types."""
    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if raw.get("model_type") not in _MODEL_TYPES:
        raise ValueError(f"model_type must be one of {_MODEL_TYPES}, not {raw.get('model_type')!r}")
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"rope type must be 'default', 'linear' or 'llama3', not {kind!r}")
    heads = int(raw["num_attention_heads"])
    eos = raw.get("eos_token_id")
    return TargetConfig(
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        vocab_size=int(raw["vocab_size"]),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=None if kind == "default" else {**rope, "rope_type": kind},
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )
