"""Edits of tiny checkpoints, by which they become those that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Q_PROJ = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


def edit_config(directory: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of `config.json`; None removes one."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of `model.safetensors` in place."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def quantize_fp8(tensors: Tensors) -> None:
    """Store a projection in 8 bits, with a scale for each block, as fp8 checkpoints do."""
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{Q_PROJ}.weight_scale_inv"] = torch.ones(1, 1)


def quantize_compressed(tensors: Tensors) -> None:
    """The same with the names of compressed-tensors."""
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{Q_PROJ}.weight_scale"] = torch.ones(1)


def quantize_int8(tensors: Tensors) -> None:
    """Store a projection in int8 with a scale for each row, as bitsandbytes does."""
    weight = tensors[f"{Q_PROJ}.weight"]
    tensors[f"{Q_PROJ}.weight"] = weight.to(torch.int8)
    tensors[f"{Q_PROJ}.SCB"] = torch.ones(weight.shape[0])


def quantize_gptq(tensors: Tensors) -> None:
    """Replace a projection by packed words, as GPTQ does."""
    del tensors[f"{Q_PROJ}.weight"]
    tensors[f"{Q_PROJ}.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    tensors[f"{Q_PROJ}.scales"] = torch.ones(1, 64, dtype=torch.float16)


def cast_to_float8(tensors: Tensors) -> None:
    """Store a projection in 8 bits without a scale."""
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.float8_e4m3fn)


def cast_to_int8(tensors: Tensors) -> None:
    """Store a projection in int8 without a scale."""
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"].to(torch.int8)
