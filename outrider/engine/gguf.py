"""GGUF reader: configuration, tensors under Hugging Face names, tokenizer metadata."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from outrider.checkpoints.fields import read_positive, read_size
from outrider.checkpoints.gguf_reader import open_gguf_reader, read_gguf_metadata
from outrider.checkpoints.model_config import ModelConfig, config_from_hf
from outrider.checkpoints.model_tensors import check_model_tensors
from outrider.checkpoints.safetensors_header import StoredTensor
from outrider.errors import InvalidRequestError, NotFoundError

_BLOCK_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PERMUTED: Final = ("attn_q", "attn_k")
_NOT_WEIGHTS: Final = ("rope_freqs",)
"""Tensors of RoPE factors. A file with such a tensor is refused, because it lacks the parameters of
its RoPE scaling."""
TENSOR_TYPES: Final = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Supported element types of tensors, by their names in the GGUF format. Tensors of these types are
dequantised to float32."""


class GGUFSource:
    """The tensors of a GGUF file, dequantised to float32 when read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = open_gguf_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._hf_names = {
            hf: name for name in self._tensors if (hf := _to_hf_name(name)) is not None
        }
        self.config = self._config()
        self._check_tensors()

    @functools.cached_property
    def metadata(self) -> Mapping[str, Any]:
        """All metadata key-value pairs of the file, as Python values."""
        return read_gguf_metadata(self._reader)

    def names(self) -> list[str]:
        """Return the Hugging Face names of all tensors, sorted."""
        return sorted(self._hf_names)

    def has(self, name: str) -> bool:
        """Return whether the file contains a tensor of this Hugging Face name."""
        return name in self._hf_names

    def get(self, name: str) -> Tensor:
        """Return the tensor in float32, with query and key projections in Hugging Face row order.

        Raises InvalidRequestError if the file has no such tensor or if the tensor cannot be
        dequantised.
        """
        import gguf

        stored_name = self._hf_names.get(name)
        if stored_name is None:
            raise InvalidRequestError(f"{self._path}: the checkpoint has no tensor {name!r}")
        stored = self._tensors[stored_name]
        try:
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise InvalidRequestError(
                f"{self._path}: cannot dequantise {stored_name} ({stored.tensor_type.name})"
            ) from error
        tensor = torch.from_numpy(values.copy()).to(torch.float32)
        kind = stored_name.split(".")[2] if stored_name.startswith("blk.") else ""
        if kind in _PERMUTED and self.config.architecture in ("llama", "mistral"):
            tensor = separate_pairs(tensor, self.config.head_dim)
        return tensor

    def _check_tensors(self) -> None:
        """Raise InvalidRequestError if tensors are unknown, missing or of unsupported types."""
        tensors = {
            # A tensor without a Hugging Face name is unknown; the error shows its name in the
            # file.
            _to_hf_name(name) or name: StoredTensor(
                dtype=str(tensor.tensor_type.name),
                # GGUF stores dimensions innermost first.
                shape=tuple(int(extent) for extent in reversed(tensor.shape)),
            )
            for name, tensor in self._tensors.items()
        }
        check_model_tensors(str(self._path), self.config, tensors, dtypes=TENSOR_TYPES)

    def _config(self) -> ModelConfig:
        try:
            return config_from_hf(self._hf_config())
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{self._path}: {error.message}", reason="INVALID_CHECKPOINT"
            ) from error
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"{self._path}: the metadata is malformed", reason="INVALID_CHECKPOINT"
            ) from error

    def _hf_config(self) -> dict[str, Any]:
        """Return the metadata in the form of a Hugging Face `config.json`."""
        arch = self._value("general.architecture")
        hidden = self._size(f"{arch}.embedding_length")
        heads = self._size(f"{arch}.attention.head_count")
        head_dim = self._size(f"{arch}.attention.key_length", hidden // heads)
        epsilon = self._positive(f"{arch}.attention.layer_norm_rms_epsilon")
        if "token_embd.weight" not in self._tensors:
            raise InvalidRequestError("the file has no tensor 'token_embd.weight'")
        self._refuse_window(arch)
        return {
            "model_type": arch,
            "hidden_size": hidden,
            "intermediate_size": self._size(f"{arch}.feed_forward_length"),
            "num_hidden_layers": self._size(f"{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size(f"{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "partial_rotary_factor": self._size(f"{arch}.rope.dimension_count", head_dim)
            / head_dim,
            # Stored as float32: 1e-5 reads as 9.99999975e-06.
            "rms_norm_eps": float(f"{epsilon:.6g}"),
            "rope_theta": self._positive(f"{arch}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(arch),
            "max_position_embeddings": self._size(f"{arch}.context_length"),
            "sliding_window": None,
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id", None),
        }

    def _refuse_window(self, arch: str) -> None:
        """Raise InvalidRequestError for a sliding window: a GGUF file does not say in which layers
        it applies."""
        window = self._value(f"{arch}.attention.sliding_window", 0)
        if window and window < self._size(f"{arch}.context_length"):
            raise InvalidRequestError(
                "sliding windows are not supported in GGUF files; use the safetensors checkpoint"
            )

    def _rope_scaling(self, arch: str) -> dict[str, Any] | None:
        if any(name.startswith(_NOT_WEIGHTS) for name in self._tensors):
            # llama3 scaling survives in a GGUF only as a table of factors, not as its parameters.
            raise InvalidRequestError(
                "rope scaling by a factor table is not supported in GGUF files; "
                "use the safetensors checkpoint"
            )
        kind = self._value(f"{arch}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._positive(f"{arch}.rope.scaling.factor")}

    def _value(self, key: str, *default: Any) -> Any:
        field = self._reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise InvalidRequestError(f"{key} is missing in the metadata")

    def _size(self, key: str, *default: int) -> int:
        return read_size({key: self._value(key, *default)}, key)

    def _positive(self, key: str, *default: float) -> float:
        return read_positive({key: self._value(key, *default)}, key)


def open_gguf(path: str | Path) -> GGUFSource:
    """Open a `.gguf` file.

    Raises NotFoundError if there is no such file, InvalidRequestError if the file is damaged or not
    supported, and FailedPreconditionError if the `gguf` package is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    return GGUFSource(path)


def separate_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Return Llama's query or key weight in the row order of Hugging Face instead of that of GGUF.

    GGUF stores the two rows of a rotary pair next to each other. Hugging Face stores, for each
    head, the first rows of all pairs and then their second rows.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _to_hf_name(name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{suffix}"
    return None
