"""The rotary embedding that a Hugging Face `config.json` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.errors import InvalidRequestError

ROPE_TYPES: Final = ("default", "linear", "llama3")
"""Types of frequency scaling that are supported."""
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
    """Return theta and the scaling (None, or `rope_type` with its factors).

    Newer files keep both under `rope_parameters`. Raises InvalidRequestError for what is not
    supported, and KeyError, TypeError or ValueError for a malformed field.
    """
    merged = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(raw.get("rope_theta") or merged.get("rope_theta") or _DEFAULT_THETA)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise InvalidRequestError(f"rope type must be one of {list(ROPE_TYPES)}, not {kind!r}")
    part = merged.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part is not None and float(part) != 1.0:
        raise InvalidRequestError(f"partial_rotary_factor must be 1.0, not {part!r}")
    if kind == "default":
        return theta, None
    return theta, {"rope_type": kind, **{key: float(merged[key]) for key in _FACTORS[kind]}}
