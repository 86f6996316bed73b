"""What the engine must know about a target model, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.errors import InvalidRequestError

ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that share the Llama skeleton and are supported."""
ROPE_TYPES: Final = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of a decoder of the Llama skeleton."""

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
    """Whether the output projection is the embedding."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over every query and key head before the rotary embedding (Qwen3)."""
    sliding_window: int | None = None
    """A query at position p sees keys at positions above p - sliding_window; None sees all."""
    max_position_embeddings: int = 2048
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a generation."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "head_dim"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InvalidRequestError(
                f"num_heads ({self.num_heads}) must be a positive multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InvalidRequestError(f"head_dim must be even, not {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidRequestError(f"sliding_window must be positive: {self.sliding_window}")


def config_from_hf(raw: Mapping[str, Any], *, more_eos_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Translate the fields of a Hugging Face `config.json`."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise InvalidRequestError(f"model_type must be one of {list(ARCHITECTURES)}, not {kind!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidRequestError(f"hidden_act must be 'silu', not {raw['hidden_act']!r}")
    try:
        return _translate(raw, str(kind), more_eos_ids)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"config.json: missing or malformed field: {error}") from error


def _translate(raw: Mapping[str, Any], kind: str, more_eos_ids: tuple[int, ...]) -> ModelConfig:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    theta, scaling = _rope(raw)
    llama_bias = bool(raw.get("attention_bias")) if kind in ("llama", "qwen3") else False
    bos = raw.get("bos_token_id")
    return ModelConfig(
        architecture=kind,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or llama_bias,
        o_bias=llama_bias,
        mlp_bias=bool(raw.get("mlp_bias")) if kind == "llama" else False,
        qk_norm=kind == "qwen3",
        sliding_window=_sliding_window(raw, kind),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        bos_id=None if bos is None else int(bos),
        eos_ids=tuple(sorted({*eos_ids_of(raw.get("eos_token_id")), *more_eos_ids})),
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling; newer files keep both under `rope_parameters`."""
    merged = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(raw.get("rope_theta") or merged.get("rope_theta") or 10000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InvalidRequestError(f"rope type must be one of {list(ROPE_TYPES)}, not {kind!r}")
    if kind == "default":
        return theta, None
    keys = ["factor"]
    if kind == "llama3":
        keys += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    return theta, {"rope_type": kind, **{key: float(merged[key]) for key in keys}}


def _sliding_window(raw: Mapping[str, Any], kind: str) -> int | None:
    """The window, if every layer slides. Models that mix layers are refused, not approximated."""
    window = raw.get("sliding_window")
    if kind == "llama" or window is None:
        return None
    if kind == "mistral":
        return int(window)
    if not raw.get("use_sliding_window"):
        return None
    layer_types = set(raw.get("layer_types") or ())
    if layer_types == {"full_attention"}:
        return None
    if layer_types == {"sliding_attention"}:
        return int(window)
    raise InvalidRequestError("layers that mix full and sliding attention are not supported")


def eos_ids_of(value: Any) -> tuple[int, ...]:
    """What `eos_token_id` says: none, one id or a list of them."""
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)
