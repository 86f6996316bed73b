"""Draft head loader for checkpoints in the original EAGLE or the `speculators` format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.checkpoints.head_config import HeadConfig, load_head_config
from outrider.checkpoints.head_tensors import (
    EMBEDDING,
    LM_HEAD,
    PICKLE,
    REASON,
    SAFETENSORS,
    canonical_name,
    canonical_tensors,
    check_head_tensors,
    uses_head_embedding,
)
from outrider.checkpoints.safetensors_header import StoredTensor, read_header
from outrider.engine.heads.eagle import EagleHead
from outrider.engine.heads.eagle3 import BlockWeights, Eagle3Head
from outrider.engine.heads.layers import LinearFactory
from outrider.engine.heads.projection import FeatureProjection, projection_fingerprint
from outrider.engine.linear import make_linear
from outrider.errors import InvalidRequestError

_PROJECTION_PREFIXES: Final = ("fc.", "fc_norm.", "input_norm.")
_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}
"""Name of each dtype in safetensors files, with which tensors from a pickle are described."""


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
    """Build a draft head from `path`, a directory with config.json and weights.

    `embedding` and `lm_head` are weights of the target, each [V, H] (V: vocabulary size, H: hidden
    size). The checkpoint's own embedding replaces `embedding` only if the target has another hidden
    size. `lm_head` is used only if the checkpoint has none. Raises InvalidRequestError
    (INVALID_HEAD) for a head that is damaged or not supported.
    """
    config, tensors = _read(Path(path), num_target_layers)
    names = _Names(tensors, dtype, torch.device(device))
    fingerprint = projection_fingerprint(config, _projection_tensors(config, tensors))
    table = _embedding(Path(path), config, names, embedding)
    block = _block_weights(names, config, make_linear)
    head_weight = names.find(LM_HEAD) if config.kind == "eagle3" else None
    if head_weight is None:
        if lm_head is None:
            raise _invalid(path, "the checkpoint has no lm_head.weight: pass the target's lm_head")
        head_weight = names.convert(lm_head)
        shape = (config.draft_vocab_size, config.hidden_size)
        _expect(path, "the target's lm_head.weight", head_weight, shape)
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
        target_ids=_target_ids(Path(path), config, tensors, names.device),
    )


def load_feature_projection(
    path: str | Path,
    *,
    num_target_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    make_linear: LinearFactory = make_linear,
) -> FeatureProjection:
    """Build the part of a head that runs in the verifier: the feature projection (fc) and its
    norms.

    Raises InvalidRequestError (INVALID_HEAD) for a head that is damaged or not supported.
    """
    config, tensors = _read(Path(path), num_target_layers, wanted=_is_projection)
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
    """The tensors of a checkpoint, indexed by canonical name and converted to one dtype and device
    when they are read."""

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
            raise AssertionError(f"the table of tensors lets {name} be missing")
        return tensor


def _is_projection(name: str) -> bool:
    return name.startswith(_PROJECTION_PREFIXES)


def _projection_tensors(config: HeadConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if config.kind == "eagle":
        return {}
    return {name: tensor for name, tensor in tensors.items() if _is_projection(name)}


def _read(
    path: Path, num_target_layers: int | None, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Check the whole head. Return its configuration, and a dict from canonical names to those
    tensors whose name `wanted` accepts."""
    config = load_head_config(path, num_target_layers=num_target_layers)
    safe, pickled = path / SAFETENSORS, path / PICKLE
    try:
        if safe.is_file():
            config = _check(path, config, read_header(safe))
            with safe_open(safe, framework="pt") as file:
                tensors = {
                    canonical_name(name): file.get_tensor(name)
                    for name in file.keys()  # noqa: SIM118 (not a mapping)
                    if wanted(canonical_name(name))
                }
            return config, tensors
        if pickled.is_file():
            loaded = _unpickle(path, pickled)
            config = _check(path, config, _describe(loaded))
            return config, {
                canonical_name(name): tensor
                for name, tensor in loaded.items()
                if wanted(canonical_name(name))
            }
    except (SafetensorError, OSError) as error:
        raise _invalid(path, f"damaged weights: {error}") from error
    raise _invalid(path, f"holds neither {safe.name} nor {pickled.name}")


def _unpickle(path: Path, file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # every defect has an exception of its own
        raise _invalid(path, f"damaged weights: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise _invalid(path, f"{PICKLE} holds something else than tensors")
    return {str(name): tensor for name, tensor in loaded.items()}


def _check(path: Path, config: HeadConfig, tensors: Mapping[str, StoredTensor]) -> HeadConfig:
    return check_head_tensors(path, config, canonical_tensors(path, tensors))


def _describe(loaded: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Describe the tensors of a pickle as a safetensors header does."""
    return {
        name: StoredTensor(
            dtype=_DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), shape=tuple(tensor.shape)
        )
        for name, tensor in loaded.items()
    }


def _embedding(path: Path, config: HeadConfig, names: _Names, target: Tensor | None) -> Tensor:
    own = names.find(EMBEDDING)
    width = None if target is None else target.shape[-1]
    if uses_head_embedding(path, config, own is not None, width):
        assert own is not None
        table = own
    else:
        assert target is not None
        table = names.convert(target)
    _expect(path, "embed_tokens", table, (config.vocab_size, config.hidden_size))
    return table


def _block_weights(names: _Names, config: HeadConfig, make_linear: LinearFactory) -> BlockWeights:
    attn, mlp = "midlayer.self_attn.", "midlayer.mlp."
    kv_weight = torch.cat([names.get(f"{attn}{n}.weight") for n in ("k_proj", "v_proj")])
    kv_bias = None
    if config.qkv_bias:
        kv_bias = torch.cat([names.get(f"{attn}{n}.bias") for n in ("k_proj", "v_proj")])
    gate_up = torch.cat([names.get(f"{mlp}{n}.weight") for n in ("gate_proj", "up_proj")])
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


def _target_ids(
    path: Path, config: HeadConfig, tensors: dict[str, Tensor], device: torch.device
) -> Tensor:
    """Return the target id of every draft id. The stored tensor `d2t` holds target id - draft
    id."""
    ids = torch.arange(config.draft_vocab_size, dtype=torch.int64)
    if "d2t" in tensors:
        ids = ids + tensors["d2t"].to(torch.int64)
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
        raise _invalid(path, f"d2t maps outside the vocabulary of {config.vocab_size} ids")
    return ids.to(device)


def _expect(path: str | Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise _invalid(path, f"{name} must have shape {shape}, not {tuple(tensor.shape)}")


def _invalid(path: str | Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {why}", reason=REASON)
