"""Tensors that a Llama-style decoder must have, and the check that a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from outrider.checkpoints.model_config import ModelConfig
from outrider.checkpoints.quantization import WEIGHT_DTYPES
from outrider.checkpoints.safetensors_header import StoredTensor
from outrider.checkpoints.tensor_table import TensorSpec, TensorTable
from outrider.errors import InvalidRequestError

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM_WEIGHT: Final = "model.norm.weight"
LM_HEAD: Final = "lm_head.weight"
_LM_HEAD_HINT: Final = (
    ": config.json must set tie_word_embeddings to true if the output projection is the embedding"
)
_CHUNK_BYTES: Final = 1 << 22
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 12


def model_table(config: ModelConfig, dtypes: tuple[str, ...] = WEIGHT_DTYPES) -> TensorTable:
    """Return the table of the tensors that a model must or may have. `dtypes` are the element types
    that the file format supports."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def spec(*shape: int, required: bool = True) -> TensorSpec:
        return TensorSpec(shape=shape, is_required=required, dtypes=dtypes)

    layer = {
        "input_layernorm.weight": spec(hidden),
        "post_attention_layernorm.weight": spec(hidden),
        "self_attn.q_proj.weight": spec(q_size, hidden),
        "self_attn.k_proj.weight": spec(kv_size, hidden),
        "self_attn.v_proj.weight": spec(kv_size, hidden),
        "self_attn.o_proj.weight": spec(hidden, q_size),
        "mlp.gate_proj.weight": spec(inner, hidden),
        "mlp.up_proj.weight": spec(inner, hidden),
        "mlp.down_proj.weight": spec(hidden, inner),
    }
    if config.qkv_bias:
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        layer |= {f"self_attn.{name}.bias": spec(size) for name, size in sizes.items()}
    if config.o_bias:
        layer["self_attn.o_proj.bias"] = spec(hidden)
    if config.mlp_bias:
        sizes = {"gate_proj": inner, "up_proj": inner, "down_proj": hidden}
        layer |= {f"mlp.{name}.bias": spec(size) for name, size in sizes.items()}
    if config.qk_norm:
        layer |= {
            f"self_attn.{name}.weight": spec(config.head_dim) for name in ("q_norm", "k_norm")
        }
    single = {
        EMBEDDING: spec(config.vocab_size, hidden),
        FINAL_NORM_WEIGHT: spec(hidden),
        LM_HEAD: spec(config.vocab_size, hidden, required=not config.tie_word_embeddings),
    }
    return TensorTable(
        single=single,
        layer=layer,
        num_layers=config.num_layers,
        hints={LM_HEAD: _LM_HEAD_HINT},
    )


def check_model_tensors(
    where: str,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtypes: tuple[str, ...] = WEIGHT_DTYPES,
    compare_all: bool = True,
) -> None:
    """Check that a checkpoint holds all tensors of a model and no others.

    If a model with tied embeddings also stores an output projection, it must equal the embedding.
    The two are compared byte by byte if `compare_all` is set, otherwise in samples. Raises
    InvalidRequestError (INVALID_CHECKPOINT), which says what was found and what is supported.
    `where` names the checkpoint in this error.
    """
    table = model_table(config, dtypes)
    table.check(where, tensors, reason="INVALID_CHECKPOINT")
    if config.tie_word_embeddings and LM_HEAD in tensors:
        _check_duplicate(where, tensors, compare_all)


def _check_duplicate(where: str, tensors: Mapping[str, StoredTensor], compare_all: bool) -> None:
    """Check that the stored output projection of a tied model is a copy of the embedding."""
    embedding, head = tensors[EMBEDDING], tensors[LM_HEAD]
    if embedding.dtype != head.dtype or not _has_same_bytes(embedding, head, compare_all):
        raise InvalidRequestError(
            f"{where}: config.json sets tie_word_embeddings, but {LM_HEAD} is not equal to "
            f"{EMBEDDING}: set tie_word_embeddings to false if the model has an output "
            "projection of its own",
            reason="INVALID_CHECKPOINT",
        )


def _has_same_bytes(first: StoredTensor, second: StoredTensor, compare_all: bool) -> bool:
    if first.file is None or second.file is None or first.size_bytes != second.size_bytes:
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        for offset, size in _spans(first.size_bytes, compare_all):
            one.seek(first.start + offset)
            other.seek(second.start + offset)
            if one.read(size) != other.read(size):
                return False
    return True


def _spans(total: int, compare_all: bool) -> Iterator[tuple[int, int]]:
    """Yield offsets and sizes, in bytes, of the parts that are compared."""
    if compare_all or total <= _SAMPLES * _SAMPLE_BYTES:
        yield from (
            (offset, min(_CHUNK_BYTES, total - offset)) for offset in range(0, total, _CHUNK_BYTES)
        )
    else:
        step = (total - _SAMPLE_BYTES) // (_SAMPLES - 1)
        yield from ((index * step, _SAMPLE_BYTES) for index in range(_SAMPLES))
