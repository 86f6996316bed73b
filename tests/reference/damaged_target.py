"""Copies of a checkpoint in which some tokens give NaN, and sessions over them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def damage_embedding(source: Path, destination: Path, ids: Sequence[int]) -> Path:
    """Copy a checkpoint and make the embeddings of these tokens NaN: every row that sees one of
    them has NaN logits only, and no other row has any."""
    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    tensors["model.embed_tokens.weight"][list(ids)] = torch.nan
    save_file(tensors, destination / "model.safetensors")
    return destination
