"""Export of a trained head in the original EAGLE-3 checkpoint format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoints.head_config import HeadConfig
from outrider.engine.training.head import TrainableHead
from outrider.engine.training.target import TargetConfig


def head_config_for(
    target: TargetConfig, draft_vocab_size: int, tap_layers: tuple[int, ...]
) -> HeadConfig:
    """Return the configuration of an EAGLE-3 head whose block has the dimensions of one layer of
    the target."""
    return HeadConfig(
        kind="eagle3",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        rope_theta=target.rope_theta,
        rope_scaling=target.rope_scaling,
        max_position_embeddings=target.max_position_embeddings,
        tap_layers=tap_layers,
    )


def save_head(directory: Path, head: TrainableHead, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write model.safetensors and config.json of a head to `directory`. The embedding is not
    written, because it is that of the target."""
    directory.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        tensors: dict[str, Tensor] = {
            name: value.to("cpu", dtype).contiguous()
            for name, value in head.weights(torch.float32).items()
        }
    config = head.config
    if config.draft_vocab_size != config.vocab_size:
        ids = head.target_ids.to("cpu", torch.int64)
        member = torch.zeros(config.vocab_size, dtype=torch.bool)
        member[ids] = True
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = member
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config_json(config, str(dtype).removeprefix("torch.")), indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _config_json(config: HeadConfig, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
        },
    }
