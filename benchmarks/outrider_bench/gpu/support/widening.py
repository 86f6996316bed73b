"""Widening of a small Llama model and its EAGLE-3 head: same function, cost of a large model.

Every matrix grows to the shape of a larger model. In the added dimensions the residual stream stays
exactly zero. Weights that read the added dimensions may therefore have any values and are filled
with noise; weights that write to them must be zero. RMSNorm averages over more dimensions: if h of
H dimensions are original, its weight is multiplied by sqrt(h / H) and its eps by h / H. Added
attention heads, MLP channels and layers have random input weights and zero output weights. Added
layers come after the original ones, so that the layers whose features are read keep their numbers.
The vocabulary is not widened, because an added token could win an argmax or take probability.

The noise prevents kernels from gaining time by zeros. These weights must be zero: rows that write
to added dimensions, columns of `o_proj` and `down_proj` that read added heads and channels, rows of
`fc` for added dimensions, and columns of the embedding for them (the embedding is looked up, not
multiplied).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from outrider.checkpoints.head_config import HeadConfig
from outrider.checkpoints.model_config import ModelConfig
from outrider.engine.checkpoint import TensorSource
from outrider.errors import InvalidRequestError
from outrider.models.convert import hf_config

NOISE_STD: Final = 0.02
"""Standard deviation of the random weights that do not affect the output."""
LAYER_MATRICES: Final = {
    "self_attn.q_proj": ("query", "hidden"),
    "self_attn.k_proj": ("kv", "hidden"),
    "self_attn.v_proj": ("kv", "hidden"),
    "self_attn.o_proj": ("hidden", "query"),
    "mlp.gate_proj": ("inner", "hidden"),
    "mlp.up_proj": ("inner", "hidden"),
    "mlp.down_proj": ("hidden", "inner"),
}
"""Output axis and input axis of each matrix of a layer."""
LAYER_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_LAYER_NAME: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_WRITERS: Final = ("o_proj", "down_proj")

Base = Literal["noise", "zero", "fc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec:
    """Shape to which a model is widened. The default costs as much as Llama-3.1-8B without its
    large vocabulary.

    The head dimension of the small model is kept. With a head dimension of 64, 64 query heads and
    16 KV heads are as wide as 32 and 8 heads of dimension 128.
    """

    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_layers: int = 32
    num_heads: int = 64
    num_kv_heads: int = 16


def widen_target(
    source: TensorSource,
    config: ModelConfig,
    spec: WideSpec,
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Return the `config.json` of the widened target, and an iterator of its tensors with their
    names.

    `dtype` None keeps the dtype of the source. Raises InvalidRequestError for a model that cannot
    be widened, because it is not a plain Llama or is larger than `spec` in some dimension.
    """
    wide = WidenedTarget(source, config, spec, generator, dtype=dtype, device=device)
    return hf_config(wide.config), ((name, wide.get(name)) for name in wide.names())


class WidenedTarget:
    """`TensorSource` of the widened target. Tensors are created when they are requested."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        spec: WideSpec,
        generator: torch.Generator | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if config.architecture != "llama" or config.qkv_bias or config.mlp_bias:
            raise InvalidRequestError("only Llama models without biases can be widened")
        self._source = source
        self._old = config
        self._canvas = _Canvas(config, spec, generator, dtype=dtype, device=device)
        self.config = _wide_config(config, spec)
        """Configuration of the widened model. Its LM head never shares the weights of the
        embedding."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        names = ["model.embed_tokens.weight"]
        for layer in range(self.config.num_layers):
            parts = (*LAYER_NORMS[:1], *LAYER_MATRICES, *LAYER_NORMS[1:])
            names += [f"model.layers.{layer}.{part}.weight" for part in parts]
        return [*names, "model.norm.weight", "lm_head.weight"]

    def has(self, name: str) -> bool:
        """Return whether the widened model has the tensor."""
        return name in self.names()

    def get(self, name: str) -> Tensor:
        """Return the widened tensor. Raises InvalidRequestError for an unknown name."""
        canvas = self._canvas
        if name == "model.norm.weight":
            return canvas.norm(self._source.get(name))
        if name == "model.embed_tokens.weight":
            return canvas.matrix(self._source.get(name), "rows", "hidden", "zero")
        if name == "lm_head.weight":
            tied = self._old.tie_word_embeddings or not self._source.has(name)
            stored = self._source.get("model.embed_tokens.weight" if tied else name)
            return canvas.matrix(stored, "rows", "hidden", "noise")
        match = _LAYER_NAME.fullmatch(name)
        if match is None or int(match[1]) >= self.config.num_layers:
            raise InvalidRequestError(f"the widened model has no tensor {name!r}")
        old = self._source.get(name) if int(match[1]) < self._old.num_layers else None
        return _layer_tensor(canvas, match[2], old)


def widen_head(
    tensors: Mapping[str, Tensor],
    config: HeadConfig,
    target: ModelConfig,
    spec: WideSpec,
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` and the tensors of the head of a widened target.

    `tensors` are those of the head's checkpoint, `config` is its configuration, and `target` is the
    target's configuration before widening. If the checkpoint contains an embedding, it is dropped,
    because the head reads that of the widened target. Raises InvalidRequestError for a head that
    cannot be widened.
    """
    if config.kind != "eagle3" or config.fc_norm or config.norm_before_fc:
        raise InvalidRequestError("only EAGLE-3 heads without norms before fc can be widened")
    if config.fc_bias or config.qkv_bias or config.hidden_size != target.hidden_size:
        raise InvalidRequestError("only heads without biases, as wide as their target, are widened")
    canvas = _Canvas(config, spec, generator, dtype=dtype, device=device)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            continue
        result[name] = _head_tensor(canvas, name, tensor)
    return _head_config(config, spec), result


def _head_tensor(canvas: _Canvas, name: str, tensor: Tensor) -> Tensor:
    stem = name.removeprefix("model.").removesuffix(".weight")
    if stem in ("d2t", "t2d"):
        return tensor
    if stem == "fc":
        return canvas.matrix(tensor, "hidden", "taps", "fc")
    if stem == "lm_head":
        return canvas.matrix(tensor, "rows", "hidden", "noise")
    if stem == "norm" or stem.endswith("norm"):
        return canvas.norm(tensor)
    part = ".".join(stem.split(".")[-2:])
    if part not in LAYER_MATRICES:
        raise InvalidRequestError(f"a head with {name!r} cannot be widened")
    rows, cols = LAYER_MATRICES[part]
    doubled = part.endswith(("q_proj", "k_proj", "v_proj"))
    base: Base = "zero" if part.endswith(_WRITERS) else "noise"
    return canvas.matrix(tensor, rows, "pair" if doubled else cols, base)


def _layer_tensor(canvas: _Canvas, part: str, old: Tensor | None) -> Tensor:
    """Return a tensor of a target's layer. `old` is the original tensor, or None in an added
    layer."""
    if part in LAYER_NORMS:
        return canvas.norm(old)
    if part not in LAYER_MATRICES:
        raise InvalidRequestError(f"the widened model has no tensor {part!r}")
    rows, cols = LAYER_MATRICES[part]
    return canvas.matrix(old, rows, cols, "zero" if part.endswith(_WRITERS) else "noise")


class _Canvas:
    """Positions of the original values in widened tensors, and the values that fill the rest."""

    def __init__(
        self,
        config: ModelConfig | HeadConfig,
        spec: WideSpec,
        generator: torch.Generator | None,
        *,
        dtype: torch.dtype | None,
        device: torch.device | str,
    ) -> None:
        _check_fits(config, spec)
        self._generator, self._dtype, self._device = generator, dtype, torch.device(device)
        self._scale = (config.hidden_size / spec.hidden_size) ** 0.5
        hidden, dim = torch.arange(config.hidden_size), config.head_dim
        old_group = config.num_heads // config.num_kv_heads
        new_group = spec.num_heads // spec.num_kv_heads
        groups = torch.arange(config.num_kv_heads)[:, None] * new_group + torch.arange(old_group)
        taps = torch.arange(getattr(config, "num_taps", 0))
        width = spec.hidden_size
        self._axes = {
            "hidden": (hidden, width),
            "pair": (torch.cat((hidden, width + hidden)), 2 * width),
            "taps": ((taps[:, None] * width + hidden).flatten(), len(taps) * width),
            "query": (
                (groups.flatten()[:, None] * dim + torch.arange(dim)).flatten(),
                spec.num_heads * dim,
            ),
            "kv": (torch.arange(config.num_kv_heads * dim), spec.num_kv_heads * dim),
            "inner": (torch.arange(config.intermediate_size), spec.intermediate_size),
        }

    def norm(self, old: Tensor | None) -> Tensor:
        """Return the weight of a norm: original values scaled, added ones near one (their input is
        zero)."""
        live, size = self._axes["hidden"]
        dtype = self._dtype or (torch.float32 if old is None else old.dtype)
        result = 1.0 + self._noise((size,), torch.float32)
        if old is not None:
            result[live] = old.to(self._device, torch.float32) * self._scale
        return result.to(dtype)

    def matrix(self, old: Tensor | None, rows: str, cols: str, base: Base) -> Tensor:
        """Return a matrix [out, in] with `old` at the original rows and columns."""
        live_cols, width = self._axes[cols]
        if rows == "rows":
            assert old is not None
            live_rows, height = torch.arange(old.shape[0]), old.shape[0]
        else:
            live_rows, height = self._axes[rows]
        dtype = self._dtype or (torch.float32 if old is None else old.dtype)
        result = self._filled((height, width), dtype, len(live_rows), base)
        if old is None:
            return result
        if tuple(old.shape) != (len(live_rows), len(live_cols)):
            raise InvalidRequestError(
                f"a tensor has shape {tuple(old.shape)}, the config says "
                f"{(len(live_rows), len(live_cols))}"
            )
        index = (live_rows[:, None].to(self._device), live_cols.to(self._device))
        result[index] = old.to(self._device, dtype)
        return result

    def _filled(
        self, shape: tuple[int, int], dtype: torch.dtype, live_rows: int, base: Base
    ) -> Tensor:
        if base == "noise":
            return self._noise(shape, dtype)
        result = torch.zeros(shape, dtype=dtype, device=self._device)
        if base == "fc":
            # The live output rows are the first ones; what they read beyond the taps is zero.
            result[:live_rows] = self._noise((live_rows, shape[1]), dtype)
        return result

    def _noise(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        result = torch.empty(shape, dtype=dtype, device=self._device)
        return result.normal_(std=NOISE_STD, generator=self._generator)


def weight_bytes(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of weights that one forward pass reads: those of all layers and of the LM
    head."""
    hidden, dim = config.hidden_size, config.head_dim
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * dim * hidden
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    total = config.num_layers * layer + config.vocab_size * hidden + hidden
    return total * dtype.itemsize


def _check_fits(config: ModelConfig | HeadConfig, spec: WideSpec) -> None:
    pairs = [
        ("hidden_size", config.hidden_size, spec.hidden_size),
        ("intermediate_size", config.intermediate_size, spec.intermediate_size),
        ("num_kv_heads", config.num_kv_heads, spec.num_kv_heads),
    ]
    if isinstance(config, ModelConfig):
        pairs.append(("num_layers", config.num_layers, spec.num_layers))
    if spec.num_heads % spec.num_kv_heads:
        raise InvalidRequestError("num_heads must be a multiple of num_kv_heads")
    groups = [c.num_heads // c.num_kv_heads for c in (config, spec)]
    pairs.append(("query heads a key/value head", groups[0], groups[1]))
    for name, old, new in pairs:
        if new < old:
            raise InvalidRequestError(f"{name} cannot be widened from {old} to {new}")


def _wide_config(config: ModelConfig, spec: WideSpec) -> ModelConfig:
    return replace(
        config,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / spec.hidden_size,
        tie_word_embeddings=False,
    )


def _head_config(config: HeadConfig, spec: WideSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps * config.hidden_size / spec.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "tie_word_embeddings": False,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.tap_layers),
        },
    }
