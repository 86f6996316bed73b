"""Checkpoints of a widened model and its head, written to disk in the usual format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoints.head_config import load_head_config
from outrider.engine.checkpoint import load_model_config, open_checkpoint
from outrider_bench.gpu.support.widening import (
    WidenedTarget,
    WideSpec,
    weight_bytes,
    widen_head,
    widen_target,
)

SHARD_BYTES = 4 << 30
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_target(
    model: Path,
    out: Path,
    spec: WideSpec,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Write the files of the widened target to `out`, and return the bytes of weights that one
    forward pass reads.

    The random numbers that fill the new weights are drawn on `device`.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = load_model_config(model)
    generator = torch.Generator(device).manual_seed(seed)
    source = WidenedTarget(open_checkpoint(model), config, spec)
    raw, tensors = widen_target(
        open_checkpoint(model), config, spec, generator, dtype=dtype, device=device
    )
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = number = 0

    def flush() -> None:
        nonlocal shard, size, number
        if shard:
            file = f"model-{number:05d}.safetensors"
            save_file(shard, out / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, file))
            shard, size, number = {}, 0, number + 1

    for name, tensor in tensors:
        shard[name] = tensor.cpu()
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    copy_tokenizer(model, out)
    return weight_bytes(source.config, dtype)


def write_head(
    head: Path,
    model: Path,
    out: Path,
    spec: WideSpec,
    *,
    dtype: torch.dtype,
    seed: int = 1,
    device: torch.device | str = "cpu",
) -> None:
    """Write the files of the widened head to `out`. `model` is the target before widening.

    The random numbers that fill the new weights are drawn on `device`.
    """
    out.mkdir(parents=True, exist_ok=True)
    target = load_model_config(model)
    config = load_head_config(head, num_target_layers=target.num_layers)
    generator = torch.Generator(device).manual_seed(seed)
    raw, tensors = widen_head(
        load_file(head / "model.safetensors"),
        config,
        target,
        spec,
        generator,
        dtype=dtype,
        device=device,
    )
    kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(model: Path, out: Path) -> None:
    """Copy the tokenizer's files from `model` to `out`. Files that do not exist are left out."""
    for name in _TOKENIZER_FILES:
        if model.is_dir() and (model / name).is_file():
            shutil.copyfile(model / name, out / name)
