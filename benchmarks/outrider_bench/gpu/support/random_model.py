"""Models built in device memory: random weights in a large shape, or a widened small model.

A forward with random weights costs as much as one with trained weights, but its output is
meaningless. Acceptance with random weights is simulated or not measured. Every layer has its own
weights, so that no cache holds them all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoint import TensorSource, load_model_config, open_checkpoint
from outrider.engine.heads import FeatureProjection, HeadConfig, load_feature_projection, load_head
from outrider.engine.heads.eagle3 import BlockWeights, Eagle3Head
from outrider.engine.kv_cache import KVPool
from outrider.engine.linear import PlainLinear
from outrider.engine.model_loader import WeightLoader
from outrider.engine.target import TargetModel
from outrider.errors import InvalidRequestError
from outrider.models.convert import hf_config
from outrider_bench.gpu.support.widened_files import copy_tokenizer, write_head
from outrider_bench.gpu.support.widening import LAYER_MATRICES, LAYER_NORMS, WidenedTarget, WideSpec

STD: Final = 0.02

LLAMA_8B: Final = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=131072,
)
"""Shape of Llama-3.1-8B. A forward pass reads 15.01 GB in bfloat16."""

TINY: Final = replace(
    LLAMA_8B,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
"""Tiny model for runs without an accelerator; its figures have no meaning."""

SHAPES: Final = {"llama-8b": LLAMA_8B, "tiny": TINY}


def head_shape(target: ModelConfig, draft_vocab_size: int) -> HeadConfig:
    """Return the shape of an EAGLE-3 head with the hidden size and the head counts of the target,
    which is the usual shape of such heads."""
    layers = target.num_layers
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
        max_position_embeddings=target.max_position_embeddings,
        tap_layers=(1, layers // 2 - 1, layers - 4),
    )


def build_target(
    source: TensorSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_tokens: int,
    block_tokens: int = 16,
) -> TargetModel:
    """Return a target model with unpacked weights from `source`, and with a KV pool of `kv_tokens`
    tokens."""
    pool = KVPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=max(1, -(-kv_tokens // block_tokens)),
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
    )
    weights = WeightLoader(source, config, dtype, device, False).load()
    return TargetModel(config, weights, pool)


def random_target(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_tokens: int,
    seed: int = 0,
) -> TargetModel:
    """Return a target model of this shape with normally distributed weights, created on the
    device."""
    source = RandomSource(config, dtype=dtype, device=device, seed=seed)
    return build_target(source, config, dtype=dtype, device=device, kv_tokens=kv_tokens)


class RandomSource:
    """`TensorSource` of normally distributed weights with the tensor names of a Llama checkpoint.
    Each call of `get` creates the tensor anew."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self._config = config
        self._normal = _normal(dtype, device, seed)

    def has(self, name: str) -> bool:
        """Return whether the model has a tensor of this name. It has all tensors of a Llama model
        without biases."""
        return not name.endswith(".bias")

    def get(self, name: str) -> Tensor:
        """Return the tensor, on the device. Raises InvalidRequestError for an unknown name."""
        config = self._config
        hidden, dim = config.hidden_size, config.head_dim
        sizes = {
            "hidden": hidden,
            "query": config.num_heads * dim,
            "kv": config.num_kv_heads * dim,
            "inner": config.intermediate_size,
        }
        stem = name.removesuffix(".weight")
        part = ".".join(stem.split(".")[-2:])
        if stem in ("model.embed_tokens", "lm_head"):
            return self._normal(config.vocab_size, hidden)
        if stem == "model.norm" or part.split(".")[-1] in LAYER_NORMS:
            return self._normal(hidden) + 1.0
        if part not in LAYER_MATRICES:
            raise InvalidRequestError(f"a random model has no tensor {name!r}")
        rows, cols = LAYER_MATRICES[part]
        return self._normal(sizes[rows], sizes[cols])


def random_head(
    config: HeadConfig, embedding: Tensor, *, seed: int = 1
) -> tuple[Eagle3Head, FeatureProjection]:
    """Return an EAGLE-3 head of this shape, and the projection of its features, which the verifier
    computes.

    Both have normally distributed weights, with the device and the dtype of `embedding`, the
    target's embedding [V, H]. The ids of the draft vocabulary are random and sorted.
    """
    normal = _normal(embedding.dtype, embedding.device, seed)
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    block = BlockWeights(
        qkv=(PlainLinear(normal(query, 2 * hidden)), PlainLinear(normal(2 * kv, 2 * hidden))),
        o_proj=PlainLinear(normal(hidden, query)),
        gate_up=PlainLinear(normal(2 * inner, hidden)),
        down=PlainLinear(normal(hidden, inner)),
        post_norm=normal(hidden) + 1.0,
    )
    fingerprint = f"random-{config.hidden_size}-{seed}"
    head = Eagle3Head(
        config,
        block,
        fingerprint=fingerprint,
        embedding=embedding,
        input_norm=normal(hidden) + 1.0,
        hidden_norm=normal(hidden) + 1.0,
        final_norm=normal(hidden) + 1.0,
        lm_head=PlainLinear(normal(config.draft_vocab_size, hidden)),
        target_ids=kept.sort().values.to(embedding.device),
    )
    width = config.num_taps * config.target_hidden_size
    projection = FeatureProjection(config, PlainLinear(normal(hidden, width)), fingerprint)
    return head, projection


def widened_target(
    model: Path,
    spec: WideSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_tokens: int,
    seed: int = 0,
) -> TargetModel:
    """Return the checkpoint in `model` as a target model widened to `spec`, created on the
    device."""
    generator = torch.Generator(device).manual_seed(seed)
    source = WidenedTarget(
        open_checkpoint(model),
        load_model_config(model),
        spec,
        generator,
        dtype=dtype,
        device=device,
    )
    return build_target(source, source.config, dtype=dtype, device=device, kv_tokens=kv_tokens)


def write_drafter_files(
    model: Path, head: Path, out: Path, spec: WideSpec, target: TargetModel
) -> tuple[Path, Path]:
    """Write the files of a widened model that a drafter process needs.

    Returns two directories in `out`: one with configuration, tokenizer and embedding of the target,
    and one with the widened head.
    """
    wide_model, wide_head = out / "target", out / "head"
    wide_model.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(hf_config(target.config))
    (wide_model / "config.json").write_text(raw, encoding="utf-8")
    copy_tokenizer(model, wide_model)
    embedding = {"model.embed_tokens.weight": target.embedding.cpu().contiguous()}
    save_file(embedding, wide_model / "model.safetensors", metadata={"format": "pt"})
    write_head(head, model, wide_head, spec, dtype=target.dtype, device=target.device)
    return wide_model, wide_head


def load_in_process_drafter(
    head: Path, target: TargetModel
) -> tuple[Eagle3Head, FeatureProjection]:
    """Load an EAGLE-3 head and the projection of its features from a checkpoint onto the target's
    device, with unpacked weights. Raises InvalidRequestError if it is not an EAGLE-3 head."""
    layers = target.config.num_layers
    both = load_head(
        head,
        embedding=target.embedding,
        num_target_layers=layers,
        dtype=target.dtype,
        device=target.device,
        make_linear=PlainLinear,
    )
    if not isinstance(both, Eagle3Head):
        raise InvalidRequestError(f"{head}: not an EAGLE-3 head")
    projection = load_feature_projection(
        head,
        num_target_layers=layers,
        dtype=target.dtype,
        device=target.device,
        make_linear=PlainLinear,
    )
    return both, projection


def _normal(dtype: torch.dtype, device: torch.device, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        result = torch.empty(shape, dtype=dtype, device=device)
        return result.normal_(std=STD, generator=generator)

    return make
