"""Trainable EAGLE-3 head with fp32 master weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.training.target import TrainingTarget


class TrainableHead(nn.Module):
    """Parameters of an EAGLE-3 head for training: fp32 master weights, named as in a checkpoint."""

    def __init__(self, config: HeadConfig, target_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        shapes = {
            "fc.weight": (hidden, config.num_taps * config.target_hidden_size),
            "midlayer.self_attn.q_proj.weight": (q_size, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv_size, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv_size, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, q_size),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "lm_head.weight": (config.draft_vocab_size, hidden),
        }
        norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
        for name in (*norms, "midlayer.post_attention_layernorm"):
            self.add_weight(f"{name}.weight", torch.ones(hidden))
        for name, shape in shapes.items():
            self.add_weight(name, torch.randn(shape) * 0.02)
        self.register_buffer("target_ids", target_ids)
        self.target_ids: Tensor

    def add_weight(self, name: str, value: Tensor) -> None:
        """Register a master weight under its name in a checkpoint. Dots are replaced by double
        underscores, because torch does not allow dots in parameter names."""
        self.register_parameter(name.replace(".", "__"), nn.Parameter(value))

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return a dict from checkpoint names to the weights, cast to `dtype`. Gradients flow back
        to the master weights."""
        return {n.replace("__", "."): p.to(dtype) for n, p in self.named_parameters()}

    @torch.no_grad()
    def initialise_from(self, target: TrainingTarget) -> None:
        """Initialise the head from the target: copy the lm_head rows of the draft vocabulary and
        the final norm, and set fc so that it returns the hidden state of the highest tap layer."""
        named = {n.replace("__", "."): p for n, p in self.named_parameters()}
        named["lm_head.weight"].copy_(target.lm_head[self.target_ids.to(target.device)].float())
        named["norm.weight"].copy_(target.norm.float())
        if self.config.hidden_size == self.config.target_hidden_size:
            fc = named["fc.weight"]
            fc.zero_()
            fc[:, -self.config.hidden_size :] = torch.eye(self.config.hidden_size)
