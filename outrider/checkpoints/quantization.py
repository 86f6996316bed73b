"""Refusal of quantised checkpoints, whose scales the engine does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.errors import InvalidRequestError

WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights in safetensors files that are supported, by the names of that format."""
INDEX_DTYPES: Final = ("I64", "I32")
"""Dtypes of tensors of token ids that are supported."""
SUPPORTED: Final = (
    "supported are unquantised safetensors weights (float32, float16, bfloat16 or float64) and "
    "GGUF files"
)
_CONFIG_KEYS: Final = ("quantization_config", "compression_config", "quantization")
"""Keys of `config.json` by which quantisers announce their formats."""


def check_unquantized(raw: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if a `config.json` announces quantised weights."""
    for key in _CONFIG_KEYS:
        found = raw.get(key)
        if found is not None:
            raise InvalidRequestError(f"{key}{_method_of(found)} is not supported: {SUPPORTED}")


def _method_of(found: Any) -> str:
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return f" ({method})" if isinstance(method, str) else ""
