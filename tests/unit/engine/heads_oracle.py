"""float64 numpy reference of both heads, and writers of tiny checkpoints in every format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[np.float64]

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 16, 24, 4, 2, 4
VOCAB, DRAFT_VOCAB, THETA, EPS = 40, 24, 10000.0, 1e-5


@dataclass(frozen=True)
class Checkpoint:
    """What was written, by canonical name, and the target tensors it belongs to."""

    tensors: dict[str, Array]
    embedding: Array
    lm_head: Array
    target_ids: NDArray[np.int64]


def write_eagle3(
    path: Path, flags: dict[str, Any] | None = None, *, speculators: bool = False
) -> Checkpoint:
    """A random EAGLE-3 checkpoint with the given variant flags."""
    flags = flags or {}
    rng = np.random.default_rng(3)
    tensors = _block(rng, 2 * HIDDEN)
    tensors["fc.weight"] = rng.normal(size=(HIDDEN, 3 * HIDDEN)) * 0.2
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + rng.normal(size=HIDDEN) * 0.1
    tensors["lm_head.weight"] = rng.normal(size=(DRAFT_VOCAB, HIDDEN))
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + rng.normal(size=3 * HIDDEN) * 0.1
    if flags.get("fc_norm"):
        for i in range(3):
            tensors[f"fc_norm.{i}.weight"] = 1 + rng.normal(size=HIDDEN) * 0.1
    ids = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB])
    member = np.zeros(VOCAB, dtype=bool)
    member[ids] = True
    extra = {"d2t": torch.from_numpy(ids - np.arange(DRAFT_VOCAB)), "t2d": torch.from_numpy(member)}
    embedding = rng.normal(size=(VOCAB, HIDDEN))
    layer = _llama_config()
    config: dict[str, Any]
    if speculators:
        extra["embed_tokens.weight"] = torch.from_numpy(embedding)
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_aux_hidden_state_layer_ids": [2, 3, 4, 6],
            "norm_before_residual": False,
            **flags,
        }
    else:
        config = {
            **layer,
            **flags,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCAB,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        }
    _write(path, config, tensors, extra, "layers.0." if speculators else "midlayer.")
    return Checkpoint(tensors, embedding, tensors["lm_head.weight"], ids)


def write_eagle(path: Path, *, input_norm: bool = False, qkv_bias: bool = False) -> Checkpoint:
    """A random EAGLE-1/2 checkpoint."""
    rng = np.random.default_rng(4)
    tensors = _block(rng, HIDDEN)
    tensors["fc.weight"] = rng.normal(size=(HIDDEN, 2 * HIDDEN)) * 0.2
    tensors["fc.bias"] = rng.normal(size=HIDDEN) * 0.1
    if input_norm:
        tensors["midlayer.input_layernorm.weight"] = 1 + rng.normal(size=HIDDEN) * 0.1
    if qkv_bias:
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            tensors[f"midlayer.self_attn.{name}.bias"] = rng.normal(size=heads * HEAD_DIM)
    config = {**_llama_config(), "architectures": ["LlamaForCausalLM"]}
    _write(path, config, tensors, {}, "layers.0.")
    embedding, lm_head = rng.normal(size=(2, VOCAB, HIDDEN))
    return Checkpoint(tensors, embedding, lm_head, np.arange(VOCAB))


def _llama_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rope_theta": THETA,
    }


def _block(rng: np.random.Generator, width: int) -> dict[str, Array]:
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {f"midlayer.{n}.weight": rng.normal(size=s) * 0.3 for n, s in shapes.items()}
    tensors["midlayer.post_attention_layernorm.weight"] = 1 + rng.normal(size=HIDDEN) * 0.1
    return tensors


def _write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Array],
    extra: dict[str, torch.Tensor],
    prefix: str,
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = {n.replace("midlayer.", prefix): torch.from_numpy(t) for n, t in tensors.items()}
    save_file({**stored, **extra}, path / "model.safetensors")


def norm(x: Array, weight: Array) -> Array:
    """RMSNorm over the last dim."""
    scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight
    return scaled


def rope(x: Array, positions: Array) -> Array:
    """Rotate-half RoPE of x [N, heads, hd]."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def project(tensors: dict[str, Array], raw: Array, flags: dict[str, Any]) -> Array:
    """fc with its norms: [N, 3H] -> [N, H]."""
    if flags.get("norm_before_fc"):
        raw = norm(raw, tensors["input_norm.weight"])
    if flags.get("fc_norm"):
        parts = np.split(raw, 3, axis=-1)
        raw = np.concatenate(
            [norm(p, tensors[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], axis=-1
        )
    out: Array = raw @ tensors["fc.weight"].T
    return out


def chain_logits(
    checkpoint: Checkpoint, features: Array, tokens: list[int], steps: int, flags: dict[str, Any]
) -> tuple[Array, list[int]]:
    """Recompute from scratch: logits of each of `steps` greedy drafts and the drafted target ids.

    `features` [n, H] and `tokens` [n] are the stable rows; draft rows are appended to them.
    """
    w, kind3 = checkpoint.tensors, "midlayer.hidden_norm.weight" in checkpoint.tensors
    features, tokens = features.copy(), list(tokens)
    drafted, all_logits = [], []
    for _ in range(steps):
        x = _last_row(checkpoint, features, tokens, flags)
        final = norm(x, w["norm.weight"]) if kind3 else x
        logits = final @ checkpoint.lm_head.T
        all_logits.append(logits)
        token = int(checkpoint.target_ids[int(np.argmax(logits))])
        drafted.append(token)
        handed_on = final if flags.get("norm_output") else x
        features = np.concatenate((features, handed_on[None]))
        tokens.append(token)
    return np.stack(all_logits), drafted


def _last_row(
    checkpoint: Checkpoint, features: Array, tokens: list[int], flags: dict[str, Any]
) -> Array:
    w = checkpoint.tensors
    embedded = checkpoint.embedding[np.asarray(tokens)]
    if "midlayer.hidden_norm.weight" in w:
        hidden = norm(features, w["midlayer.hidden_norm.weight"])
        residual = hidden if flags.get("norm_before_residual") else features
        a = np.concatenate((norm(embedded, w["midlayer.input_layernorm.weight"]), hidden), axis=-1)
    else:
        residual = np.concatenate((embedded, features), axis=-1) @ w["fc.weight"].T + w["fc.bias"]
        a = residual
        if "midlayer.input_layernorm.weight" in w:
            a = norm(residual, w["midlayer.input_layernorm.weight"])
    positions = np.arange(len(tokens), dtype=np.float64)

    def heads(name: str, count: int) -> Array:
        prefix = f"midlayer.self_attn.{name}"
        rows = a @ w[f"{prefix}.weight"].T + w.get(f"{prefix}.bias", np.zeros(1))
        return rows.reshape(len(tokens), count, HEAD_DIM)

    query = rope(heads("q_proj", HEADS), positions)[-1]
    keys, values = rope(heads("k_proj", KV_HEADS), positions), heads("v_proj", KV_HEADS)
    keys, values = (t.repeat(HEADS // KV_HEADS, axis=1) for t in (keys, values))
    scores = np.einsum("hd,lhd->hl", query, keys) / np.sqrt(HEAD_DIM)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hl,lhd->hd", weights, values).reshape(-1)
    h = residual[-1] + w["midlayer.self_attn.o_proj.weight"] @ attended
    normed = norm(h, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (w[f"midlayer.mlp.{n}.weight"] @ normed for n in ("gate_proj", "up_proj"))
    out: Array = h + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return out
