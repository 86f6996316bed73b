"""Loading heads from a checkpoint directory, in the original EAGLE or the `speculators` format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.engine.heads.config import HeadConfig, load_head_config
from outrider.engine.heads.eagle import EagleHead
from outrider.engine.heads.eagle3 import BlockWeights, Eagle3Head
from outrider.engine.heads.layers import LinearFactory
from outrider.engine.heads.projection import FeatureProjection, projection_fingerprint
from outrider.engine.linear import make_linear

_PROJECTION_PREFIXES = ("fc.", "fc_norm.", "input_norm.")


def load_head(
    path: str | Path,
    *,
    embedding: Tensor | None,
    lm_head: Tensor | None = None,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    make_linear: LinearFactory = make_linear,
) -> Eagle3Head | EagleHead:
    """Build a head from `path` (a directory with config.json and weights).

    `embedding` and `lm_head` are the target's [V, H]. The embedding is used unless the checkpoint
    carries its own and the target is of another width; the lm_head only if the checkpoint has none.
    """
    tensors = _read_tensors(Path(path))
    config = _fit_config(load_head_config(path, num_target_layers=num_target_layers), tensors)
    names = _Names(tensors, dtype, torch.device(device))
    fingerprint = projection_fingerprint(config, _projection_tensors(config, tensors))
    table = _embedding(config, names, embedding)
    block = _block_weights(names, config, make_linear)
    head_weight = names.find("lm_head.weight") if config.kind == "eagle3" else None
    if head_weight is None:
        if lm_head is None:
            raise ValueError("the checkpoint has no lm_head.weight: pass the target's lm_head")
        head_weight = names.convert(lm_head)
    names.expect("lm_head.weight", head_weight, (config.draft_vocab_size, config.hidden_size))
    if config.kind == "eagle":
        return EagleHead(
            config,
            block,
            fingerprint=fingerprint,
            embedding=table,
            fc=make_linear(names.get("fc.weight"), names.find("fc.bias")),
            input_norm=names.find("midlayer.input_layernorm.weight"),
            lm_head=make_linear(head_weight),
        )
    return Eagle3Head(
        config,
        block,
        fingerprint=fingerprint,
        embedding=table,
        input_norm=names.get("midlayer.input_layernorm.weight"),
        hidden_norm=names.get("midlayer.hidden_norm.weight"),
        final_norm=names.get("norm.weight"),
        lm_head=make_linear(head_weight),
        target_ids=_target_ids(config, tensors, names.device),
    )


def load_feature_projection(
    path: str | Path,
    *,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    make_linear: LinearFactory = make_linear,
) -> FeatureProjection:
    """Build only the verifier's part of a head: fc and its norms."""
    tensors = _read_tensors(Path(path), wanted=_is_projection)
    config = load_head_config(path, num_target_layers=num_target_layers)
    config = _fit_config(config, tensors) if config.kind == "eagle3" else config
    stored = _projection_tensors(config, tensors)
    fingerprint = projection_fingerprint(config, stored)
    if config.kind == "eagle":
        return FeatureProjection(config, None, fingerprint)
    names = _Names(stored, dtype, torch.device(device))
    norms: tuple[Tensor, ...] = ()
    if config.norm_before_fc:
        norms = (names.get("input_norm.weight"),)
    elif config.fc_norm:
        norms = tuple(names.get(f"fc_norm.{i}.weight") for i in range(config.num_taps))
    fc = make_linear(names.get("fc.weight"), names.find("fc.bias"))
    return FeatureProjection(config, fc, fingerprint, norm_weights=norms)


class _Names:
    """Tensors by canonical name, converted on the way out."""

    def __init__(
        self, tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self.device = device

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self._dtype)

    def find(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else self.convert(tensor)

    def get(self, name: str) -> Tensor:
        tensor = self.find(name)
        if tensor is None:
            raise ValueError(f"the checkpoint has no tensor {name!r}")
        return tensor

    @staticmethod
    def expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, not {tuple(tensor.shape)}")


def _is_projection(name: str) -> bool:
    return name.startswith(_PROJECTION_PREFIXES)


def _projection_tensors(config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if config.kind == "eagle":
        return {}
    return {name: tensor for name, tensor in tensors.items() if _is_projection(name)}


def _read_tensors(
    path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Tensors of the checkpoint under canonical names: `layers.0.` becomes `midlayer.`."""
    safe, pickled = path / "model.safetensors", path / "pytorch_model.bin"
    if safe.is_file():
        with safe_open(safe, framework="pt") as file:
            return {
                _canonical(name): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (not a mapping)
                if wanted(_canonical(name))
            }
    if pickled.is_file():
        loaded = torch.load(pickled, map_location="cpu", weights_only=True)
        return {_canonical(n): t for n, t in loaded.items() if wanted(_canonical(n))}
    raise ValueError(f"{path} holds neither {safe.name} nor {pickled.name}")


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _fit_config(config: HeadConfig, tensors: dict[str, Tensor]) -> HeadConfig:
    """Reconcile the config with what only the tensors tell, and check the widths."""
    fc = tensors.get("fc.weight")
    if fc is None:
        raise ValueError("the checkpoint has no tensor 'fc.weight'")
    width = config.num_taps * config.target_hidden_size
    if config.kind == "eagle":
        width += config.hidden_size
        config = replace(config, has_input_norm="midlayer.input_layernorm.weight" in tensors)
    _Names.expect("fc.weight", fc, (config.hidden_size, width))
    has_qkv = "midlayer.self_attn.q_proj.weight" in tensors
    return replace(
        config,
        fc_bias="fc.bias" in tensors,
        norm_before_fc=config.norm_before_fc or "input_norm.weight" in tensors,
        fc_norm=config.fc_norm or "fc_norm.0.weight" in tensors,
        qkv_bias="midlayer.self_attn.q_proj.bias" in tensors if has_qkv else config.qkv_bias,
    )


def _embedding(config: HeadConfig, names: _Names, target: Tensor | None) -> Tensor:
    shared = target is not None and target.shape[-1] == config.hidden_size
    own = names.find("embed_tokens.weight")
    if own is not None and (not shared or config.target_hidden_size != config.hidden_size):
        table = own
    elif target is not None and shared:
        table = names.convert(target)
    else:
        raise ValueError(
            f"the head needs an embedding of width {config.hidden_size}: the checkpoint carries no "
            f"embed_tokens, and the target's is {None if target is None else tuple(target.shape)}"
        )
    names.expect("embed_tokens", table, (config.vocab_size, config.hidden_size))
    return table


def _block_weights(names: _Names, config: HeadConfig, make_linear: LinearFactory) -> BlockWeights:
    attn, mlp = "midlayer.self_attn.", "midlayer.mlp."
    width = config.hidden_size * (2 if config.kind == "eagle3" else 1)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        names.expect(name, names.get(f"{attn}{name}.weight"), (rows, width))
    kv_weight = torch.cat([names.get(f"{attn}{n}.weight") for n in ("k_proj", "v_proj")])
    kv_bias = None
    if config.qkv_bias:
        kv_bias = torch.cat([names.get(f"{attn}{n}.bias") for n in ("k_proj", "v_proj")])
    gate_up = torch.cat([names.get(f"{mlp}{n}.weight") for n in ("gate_proj", "up_proj")])
    names.expect("gate_up", gate_up, (2 * config.intermediate_size, config.hidden_size))
    q_bias = names.get(f"{attn}q_proj.bias") if config.qkv_bias else None
    return BlockWeights(
        qkv=(
            make_linear(names.get(f"{attn}q_proj.weight"), q_bias),
            make_linear(kv_weight, kv_bias),
        ),
        o_proj=make_linear(names.get(f"{attn}o_proj.weight")),
        gate_up=make_linear(gate_up),
        down=make_linear(names.get(f"{mlp}down_proj.weight")),
        post_norm=names.get("midlayer.post_attention_layernorm.weight"),
    )


def _target_ids(config: HeadConfig, tensors: dict[str, Tensor], device: torch.device) -> Tensor:
    """Target id of every draft id. The stored d2t is an OFFSET from the draft id."""
    ids = torch.arange(config.draft_vocab_size, dtype=torch.int64)
    if config.draft_vocab_size != config.vocab_size or "d2t" in tensors:
        if "d2t" not in tensors:
            raise ValueError("draft_vocab_size differs from vocab_size, but there is no d2t")
        _Names.expect("d2t", tensors["d2t"], (config.draft_vocab_size,))
        ids = ids + tensors["d2t"].to(torch.int64)
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
        raise ValueError(f"d2t maps outside the vocabulary of {config.vocab_size} ids")
    return ids.to(device)
