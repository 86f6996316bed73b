"""RoPE settings (theta and frequency scaling), read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.checkpoints.fields import read_mapping, read_positive
from outrider.errors import InvalidRequestError

ROPE_TYPES: Final = ("default", "linear", "llama3")
"""Supported types of RoPE frequency scaling."""
_DEFAULT_THETA: Final = 10000.0
_FACTORS: Final = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read_rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the frequency scaling: None, or a mapping with `rope_type` and its factors.

    Newer files keep both under `rope_parameters`. Raises InvalidRequestError, which names the key,
    for values that are malformed or not supported.
    """
    merged = {**read_mapping(raw, "rope_scaling"), **read_mapping(raw, "rope_parameters")}
    theta = read_positive({**merged, **_without_nulls(raw)}, "rope_theta", _DEFAULT_THETA)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InvalidRequestError(f"rope type must be one of {list(ROPE_TYPES)}, not {kind!r}")
    part = read_positive({**raw, **merged}, "partial_rotary_factor", 1.0)
    if part != 1.0:
        raise InvalidRequestError(f"partial_rotary_factor must be 1.0, not {part!r}")
    if kind == "default":
        return theta, None
    factors = {key: read_positive(merged, key) for key in _FACTORS[kind]}
    if kind == "llama3" and factors["low_freq_factor"] >= factors["high_freq_factor"]:
        raise InvalidRequestError(
            f"high_freq_factor must exceed low_freq_factor ({factors['low_freq_factor']:g}), "
            f"not be {factors['high_freq_factor']:g}"
        )
    return theta, {"rope_type": kind, **factors}


def _without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}
