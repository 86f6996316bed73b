"""Refusal of quantised checkpoints, whose scales the engine does not apply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from outrider.errors import InvalidRequestError

WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
"""Supported dtypes of weights in safetensors files, by their names in this format."""
INDEX_DTYPES: Final = ("I64", "I32")
"""Supported dtypes of tensors that hold token ids."""
SUPPORTED: Final = (
    "supported are unquantised safetensors weights (float32, float16, bfloat16 or float64) and "
    "GGUF files"
)
_CONFIG_KEYS: Final = ("quantization_config", "compression_config", "quantization")
"""Keys that tools for quantisation add to `config.json`."""


def check_unquantized(raw: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if a `config.json` says that the weights are quantised."""
    for key in _CONFIG_KEYS:
        found = raw.get(key)
        if found is not None:
            raise InvalidRequestError(f"{key}{_method_of(found)} is not supported: {SUPPORTED}")


def _method_of(found: Any) -> str:
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    return f" ({method})" if isinstance(method, str) else ""
