"""Model loader: builds a target or a small draft model with fused, packed weights.

Tensors are read, fused and packed one layer at a time, so that the peak of memory is the packed
model and one layer. Weights that are not packed may also be copied by background threads
(`WeightCopies`) while kernels compile; their memory is allocated before. The plain weight of a
packed projection is kept as well only if single rows are faster with it and the machine has enough
memory. The embedding stays plain, because its rows are looked up. If the output projection is tied
to the embedding, it is a second, packed copy.

The rows of the query and key projections are permuted to the interleaved RoPE layout
(`interleave_pairs`). The weights of `q_norm` and `k_norm` are permuted likewise, and expanded to
one row for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.checkpoints.model_config import ModelConfig
from outrider.checkpoints.model_tensors import EMBEDDING, FINAL_NORM_WEIGHT, LM_HEAD
from outrider.engine.checkpoint import TensorSource, load_model_config, open_checkpoint
from outrider.engine.kv_cache import KVPool
from outrider.engine.layers import LayerWeights, interleave_pairs
from outrider.engine.linear import Linear, can_pack, make_linear
from outrider.engine.matmul_tuning import has_memory_for_copies
from outrider.engine.target import ModelWeights, TargetModel
from outrider.engine.weight_copies import WeightCopies
from outrider.errors import FailedPreconditionError, InvalidRequestError


def load_target(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kv_tokens: int | Callable[[ModelConfig], int] = 8192,
    block_tokens: int = 16,
    packed: bool = True,
    copies: WeightCopies | None = None,
    batch_invariant: bool = False,
) -> TargetModel:
    """Load a model from a safetensors directory or a `.gguf` file.

    `kv_tokens` is the size of the KV pool in tokens, rounded up to blocks of `block_tokens`. It may
    be a function of the model configuration that returns this size; it is called after the weights
    are allocated. `packed=False` keeps plain weights. With `copies`, background threads fill the
    weights, which are undefined until `copies.wait` returns; with None, the weights are filled
    before this function returns. With `batch_invariant`, forward passes on this CPU give a row the
    same bits whatever other rows the batch holds; this needs packed weights.

    Raises NotFoundError if a file is missing, InvalidRequestError if the checkpoint is damaged or
    not supported, and FailedPreconditionError if `batch_invariant` is set and the weights cannot be
    packed. With `copies`, `copies.wait` raises the error of a tensor that the threads could not
    copy.
    """
    if batch_invariant and not (packed and can_pack(dtype, torch.device(device))):
        raise FailedPreconditionError(
            f"batch_invariant on a CPU needs packed weights, which {dtype} on {device} does not "
            "have here; use another dtype or a GPU",
            reason="BATCH_INVARIANT",
        )
    source = open_checkpoint(path)
    config = load_model_config(path)
    weights = WeightLoader(
        source, config, dtype, torch.device(device), packed, copies, batch_invariant
    ).load()
    tokens = kv_tokens(config) if callable(kv_tokens) else kv_tokens
    pool = KVPool(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=max(1, -(-tokens // block_tokens)),
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
    )
    target = TargetModel(config, weights, pool, batch_invariant=batch_invariant)
    if copies is not None:
        # Start the copies last, because the size of the pool may depend on the free memory.
        copies.start()
    return target


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values that one token occupies in the pool, over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def _weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of all matmul weights: the projections of every layer and the output
    projection."""
    heads = 2 * (config.num_heads + config.num_kv_heads)
    a_layer = heads * config.head_dim + 3 * config.intermediate_size
    rows = config.num_layers * a_layer + config.vocab_size
    return rows * config.hidden_size * dtype.itemsize


def load_embedding(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Load only the embedding [vocab_size, hidden_size]. A draft head in another process needs
    it."""
    return open_checkpoint(path).get(EMBEDDING).to(device=device, dtype=dtype)


def load_lm_head(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Load only the output projection [vocab_size, hidden_size]. It is the embedding if the model
    ties the two."""
    source = open_checkpoint(path)
    return _lm_head(source, load_model_config(path)).to(device=device, dtype=dtype)


def _lm_head(source: TensorSource, config: ModelConfig) -> Tensor:
    return source.get(EMBEDDING if config.tie_word_embeddings else LM_HEAD)


class _Part(NamedTuple):
    """One tensor of the checkpoint that becomes some rows of a fused tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    out_shape: tuple[int, ...]
    """Shape in the fused tensor."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """Function that computes the rows from the stored tensor, or None if the tensor is used
    unchanged."""


class WeightLoader:
    """Loads the weights of a model from a `TensorSource`: fuses, permutes and packs them."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        packed: bool,
        copies: WeightCopies | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Prepare to load weights. With `copies`, background threads make all copies.

        Raises ValueError if `copies` is given for weights that would be packed.
        """
        if copies is not None and packed and can_pack(dtype, device):
            raise ValueError("weights are packed from what they hold: copy them at once")
        self._source = source
        self._config = config
        self._dtype = dtype
        self._device = device
        self._copies = copies
        size = _weight_bytes(config, dtype) if packed else 0
        self._make = partial(
            make_linear,
            packed=packed,
            keep_plain=has_memory_for_copies(size),
            batch_invariant=batch_invariant,
        )

    def load(self) -> ModelWeights:
        """Load all weights, layer by layer. Raises InvalidRequestError if a shape does not match
        the configuration."""
        config = self._config
        head = _lm_head(self._source, config)
        self._expect(LM_HEAD, head, (config.vocab_size, config.hidden_size))
        # A damaged or foreign checkpoint should fail on its small tensors, before the large ones.
        final_norm = self._tensor(FINAL_NORM_WEIGHT, config.hidden_size)
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        embedding = self._tensor(EMBEDDING, config.vocab_size, config.hidden_size)
        return ModelWeights(
            embedding=embedding,
            layers=layers,
            final_norm=final_norm,
            lm_head=self._make(self._converted(head), None),
        )

    def _layer(self, prefix: str) -> LayerWeights:
        config, attention, mlp = self._config, prefix + "self_attn.", prefix + "mlp."
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        return LayerWeights(
            input_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._qkv(attention, q_size, kv_size),
            qk_norms=self._qk_norms(attention) if config.qk_norm else None,
            o_proj=self._linear([(attention + "o_proj", hidden)], q_size, config.o_bias),
            post_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)], hidden, config.mlp_bias
            ),
            down=self._linear([(mlp + "down_proj", hidden)], inner, config.mlp_bias),
        )

    def _qkv(self, prefix: str, q_size: int, kv_size: int) -> Linear:
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        dim, hidden = self._config.head_dim, self._config.hidden_size
        interleave = partial(interleave_pairs, head_dim=dim)
        arrange = {"q_proj": interleave, "k_proj": interleave, "v_proj": None}
        weight = self._fused(
            _Part(f"{prefix}{name}.weight", (size, hidden), (size, hidden), arrange[name])
            for name, size in sizes.items()
        )
        bias = None
        if self._config.qkv_bias:
            bias = self._fused(
                _Part(f"{prefix}{name}.bias", (size,), (size,), arrange[name])
                for name, size in sizes.items()
            )
        return self._make(weight, bias)

    def _qk_norms(self, prefix: str) -> Tensor:
        config = self._config
        dim = config.head_dim
        heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        return self._fused(
            _Part(f"{prefix}{name}.weight", (dim,), (count, dim), partial(_repeat_norm, count, dim))
            for name, count in heads.items()
        )

    def _linear(self, parts: Sequence[tuple[str, int]], width: int, has_bias: bool) -> Linear:
        weight = self._fused(
            _Part(f"{name}.weight", (size, width), (size, width)) for name, size in parts
        )
        bias = None
        if has_bias:
            bias = self._fused(_Part(f"{name}.bias", (size,), (size,)) for name, size in parts)
        return self._make(weight, bias)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of the checkpoint unchanged except for its dtype. On a CPU, a tensor of
        the right dtype is not copied but stays a view of the memory-mapped file."""
        if self._copies is None:
            return self._converted(self._read(name, shape))
        return self._fused([_Part(name, shape, shape)])

    def _converted(self, tensor: Tensor) -> Tensor:
        if self._copies is None:
            return tensor.to(device=self._device, dtype=self._dtype)
        out = self._empty(tensor.shape)
        self._copies.add(partial(out.copy_, tensor))
        return out

    def _fused(self, parts: Iterable[_Part]) -> Tensor:
        """Return one tensor with the rows of all parts, in order."""
        parts = list(parts)
        rows = sum(part.out_shape[0] for part in parts)
        out = self._empty((rows, *parts[0].out_shape[1:]))
        first = 0
        for part in parts:
            end = first + part.out_shape[0]
            copy = partial(self._copy, part, out[first:end])
            first = end
            if self._copies is None:
                copy()
            else:
                self._copies.add(copy)
        return out

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self._dtype, device=self._device)

    def _copy(self, part: _Part, out: Tensor) -> None:
        # The rows are permuted on the host, because doing so on the device would take memory that
        # is planned for other uses.
        tensor = self._read(part.name, part.shape)
        out.copy_(tensor if part.arrange is None else part.arrange(tensor))

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._source.get(name)
        self._expect(name, tensor, shape)
        return tensor

    @staticmethod
    def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise InvalidRequestError(
                f"{name} must have shape {shape}, not {tuple(tensor.shape)}: "
                "config and weights do not belong together"
            )


def _repeat_norm(count: int, head_dim: int, weight: Tensor) -> Tensor:
    """Return the interleaved norm weight [head_dim] for each of `count` heads, [count,
    head_dim]."""
    return interleave_pairs(weight, head_dim).expand(count, -1)
