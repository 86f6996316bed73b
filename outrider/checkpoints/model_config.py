"""Target-model configuration (`ModelConfig`), read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.checkpoints.fields import read_positive, read_size, read_token_ids
from outrider.checkpoints.quantization import check_unquantized
from outrider.checkpoints.rope import read_rope
from outrider.errors import InvalidRequestError

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Supported values of `model_type`. All these models have the layers of Llama."""
_FULL, _SLIDING = _LAYER_TYPES = ("full_attention", "sliding_attention")
"""Supported values of `layer_types`."""
DEFAULT_SLIDING_WINDOW: Final = 4096
"""Sliding window, in tokens, if `config.json` has no key `sliding_window`. It is the default of
transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and numeric settings of a Llama-style decoder."""

    architecture: str
    """One of ARCHITECTURES."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """None, or a mapping with `rope_type` ("linear" or "llama3") and its factors."""
    tie_word_embeddings: bool = False
    """Whether the embedding is also the output projection."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether an RMSNorm is applied to each query and key head before the rotary embedding
    (Qwen3)."""
    sliding_window: int | None = None
    """Sliding window in tokens: a query at position p sees keys at positions above p -
    sliding_window. None if a query sees all earlier keys."""
    max_position_embeddings: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a generation."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "head_dim"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InvalidRequestError(
                f"num_attention_heads ({self.num_heads}) must be a positive multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidRequestError(f"head_dim must be even, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidRequestError(f"sliding_window must be positive: {self.sliding_window}")


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that the fields of a Hugging Face `config.json` describe.

    Raises InvalidRequestError, which names the key, for values that are malformed or not supported.
    """
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise InvalidRequestError(f"model_type must be one of {list(ARCHITECTURES)}, not {kind!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidRequestError(f"hidden_act must be 'silu', not {raw['hidden_act']!r}")
    check_unquantized(raw)
    hidden, heads = read_size(raw, "hidden_size"), read_size(raw, "num_attention_heads")
    vocab = read_size(raw, "vocab_size")
    theta, scaling = read_rope(raw)
    llama_bias = bool(raw.get("attention_bias")) if kind in ("llama", "qwen3") else False
    bos = raw.get("bos_token_id")
    return ModelConfig(
        architecture=str(kind),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=read_size(raw, "intermediate_size"),
        num_layers=read_size(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read_size(raw, "num_key_value_heads", heads),
        head_dim=read_size(raw, "head_dim", hidden // heads),
        rms_norm_eps=read_positive(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or llama_bias,
        o_bias=llama_bias,
        mlp_bias=bool(raw.get("mlp_bias")) if kind == "llama" else False,
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(raw, str(kind)),
        max_position_embeddings=read_size(raw, "max_position_embeddings", 2048),
        # It is only handed on: the tokenizer opens documents.
        bos_id=bos if isinstance(bos, int) else None,
        eos_ids=tuple(sorted(set(read_token_ids(raw, "eos_token_id", vocab)))),
    )


def _sliding_window(raw: Mapping[str, Any], kind: str) -> int | None:
    """Return the sliding window if all layers use one. Raises InvalidRequestError for models that
    mix layer types."""
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list):
        raise InvalidRequestError(f"layer_types must be a list, not {listed!r}")
    layer_types = set(map(str, listed))
    if not layer_types <= set(_LAYER_TYPES):
        raise InvalidRequestError(
            f"layer_types must be of {list(_LAYER_TYPES)}, not {sorted(layer_types)}"
        )
    # An explicit null switches the window off; a missing key does not.
    window = raw.get("sliding_window", DEFAULT_SLIDING_WINDOW)
    if kind == "llama" or window is None:
        return None
    if kind == "mistral":
        # Without layer types, which older files do not have, every layer slides.
        layer_types = layer_types or {_SLIDING}
    elif not raw.get("use_sliding_window"):
        return None
    if layer_types == {_FULL}:
        return None
    if layer_types == {_SLIDING}:
        return read_size(raw, "sliding_window", DEFAULT_SLIDING_WINDOW)
    raise InvalidRequestError("layers that mix full and sliding attention are not supported")
