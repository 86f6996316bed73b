"""Tensors that a draft head must have, and the check of a head against its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from outrider.checkpoints.head_config import HeadConfig, load_head_config
from outrider.checkpoints.model_config import ModelConfig
from outrider.checkpoints.quantization import INDEX_DTYPES
from outrider.checkpoints.safetensors_header import StoredTensor, read_header
from outrider.checkpoints.tensor_table import TensorSpec, TensorTable
from outrider.errors import FailedPreconditionError, InvalidRequestError

REASON: Final = "INVALID_HEAD"
SAFETENSORS: Final = "model.safetensors"
PICKLE: Final = "pytorch_model.bin"
EMBEDDING: Final = "embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"


def read_head(path: Path, target: ModelConfig, *, kind: str | None = None) -> HeadConfig:
    """Read the configuration and the weight header of a head, and check that the target can use the
    head.

    `kind` is the required kind of head (eagle3 or eagle); None accepts both. Tensors in a pickle
    file are not read here; they are checked when the head is loaded. Raises InvalidRequestError
    (INVALID_HEAD) for a head that is damaged or not supported, and FailedPreconditionError for a
    head of another kind or for another target.
    """
    config = load_head_config(path, num_target_layers=target.num_layers)
    if kind is not None and config.kind != kind:
        raise FailedPreconditionError(
            f"{path} holds an {config.kind} head, not {kind}", reason="UNSUPPORTED_HEAD"
        )
    _check_target(path, config, target)
    if not (path / SAFETENSORS).is_file():
        if not (path / PICKLE).is_file():
            raise _invalid(path, f"holds neither {SAFETENSORS} nor {PICKLE}")
        return config
    tensors = canonical_tensors(path, read_header(path / SAFETENSORS))
    config = check_head_tensors(path, config, tensors)
    uses_head_embedding(path, config, EMBEDDING in tensors, target.hidden_size)
    borrows = config.kind == "eagle" or LM_HEAD not in tensors
    if borrows and config.hidden_size != target.hidden_size:
        raise _invalid(
            path,
            f"the head has no {LM_HEAD}, and the target's is for width {target.hidden_size}, not "
            f"{config.hidden_size}",
        )
    return config


def canonical_name(name: str) -> str:
    """Return a tensor's name in the original EAGLE format: `layers.0.` becomes `midlayer.`, and a
    leading `model.` is removed."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def canonical_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the descriptions of the tensors, keyed by `canonical_name`. Raises InvalidRequestError
    if two tensors have the same canonical name."""
    named = {canonical_name(name): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors):
        raise _invalid(path, "two tensors have names that mean the same")
    return named


def fit_config(path: Path, config: HeadConfig, tensors: Mapping[str, StoredTensor]) -> HeadConfig:
    """Return `config`, completed by the settings that only the tensors show, such as biases and
    norms.

    `tensors` are keyed by canonical names. Raises InvalidRequestError if the settings contradict
    each other.
    """
    block = "midlayer."
    try:
        return replace(
            config,
            has_input_norm=config.kind == "eagle3" or f"{block}input_layernorm.weight" in tensors,
            fc_bias="fc.bias" in tensors,
            norm_before_fc=config.norm_before_fc or "input_norm.weight" in tensors,
            fc_norm=config.fc_norm or "fc_norm.0.weight" in tensors,
            qkv_bias=f"{block}self_attn.q_proj.bias" in tensors,
        )
    except ValueError as error:
        raise _invalid(path, str(error)) from error


def check_head_tensors(
    path: Path, config: HeadConfig, tensors: Mapping[str, StoredTensor]
) -> HeadConfig:
    """Check that a head has all tensors that its configuration requires and no others.

    `tensors` are keyed by canonical names. Returns the configuration as completed by `fit_config`.
    Raises InvalidRequestError (INVALID_HEAD) if the check fails.
    """
    config = fit_config(path, config, tensors)
    head_table(config).check(str(path), tensors, reason=REASON)
    return config


def head_table(config: HeadConfig) -> TensorTable:
    """Return the table of the tensors that a head must or may have, by canonical names. `config`
    must come from `fit_config`."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    features = config.num_taps * config.target_hidden_size
    is_eagle3 = config.kind == "eagle3"
    single = {
        "fc.weight": _spec(hidden, features if is_eagle3 else features + hidden),
        # The target's embedding is used if the widths agree, whatever this one's size.
        EMBEDDING: TensorSpec(shape=None, is_required=False),
    }
    if config.fc_bias:
        single["fc.bias"] = _spec(hidden)
    if config.norm_before_fc:
        single["input_norm.weight"] = _spec(features)
    if config.fc_norm:
        widths = range(config.num_taps)
        single |= {f"fc_norm.{i}.weight": _spec(config.target_hidden_size) for i in widths}
    if is_eagle3:
        maps = config.draft_vocab_size != vocab
        single |= {
            "norm.weight": _spec(hidden),
            # A head over the whole vocabulary can borrow the target's output projection.
            LM_HEAD: _spec(config.draft_vocab_size, hidden, required=maps),
            "d2t": TensorSpec(
                shape=(config.draft_vocab_size,), is_required=maps, dtypes=INDEX_DTYPES
            ),
            # The same map the other way round, which is not needed.
            "t2d": TensorSpec(shape=None, is_required=False, dtypes=()),
        }
    else:
        # A copy of the target's output projection, which is used itself.
        single[LM_HEAD] = _spec(vocab, hidden, required=False)
    block = _block(config, inner)
    return TensorTable(single=single | {f"midlayer.{name}": spec for name, spec in block.items()})


def _block(config: HeadConfig, inner: int) -> dict[str, TensorSpec]:
    hidden, dim = config.hidden_size, config.head_dim
    is_eagle3 = config.kind == "eagle3"
    width = 2 * hidden if is_eagle3 else hidden
    rows = {
        "q_proj": config.num_heads * dim,
        "k_proj": config.num_kv_heads * dim,
        "v_proj": config.num_kv_heads * dim,
    }
    block = {f"self_attn.{name}.weight": _spec(size, width) for name, size in rows.items()}
    if config.qkv_bias:
        block |= {f"self_attn.{name}.bias": _spec(size) for name, size in rows.items()}
    block |= {
        "self_attn.o_proj.weight": _spec(hidden, rows["q_proj"]),
        "mlp.gate_proj.weight": _spec(inner, hidden),
        "mlp.up_proj.weight": _spec(inner, hidden),
        "mlp.down_proj.weight": _spec(hidden, inner),
        "post_attention_layernorm.weight": _spec(hidden),
    }
    if config.has_input_norm:
        block["input_layernorm.weight"] = _spec(hidden)
    if is_eagle3:
        block["hidden_norm.weight"] = _spec(hidden)
    return block


def _check_target(path: Path, head: HeadConfig, target: ModelConfig) -> None:
    """Raise FailedPreconditionError if a head was not made for this target."""
    if head.vocab_size != target.vocab_size:
        raise FailedPreconditionError(
            f"{path} is for a vocabulary of {head.vocab_size} ids, the target has "
            f"{target.vocab_size}",
            reason="VOCAB_MISMATCH",
        )
    if any(tap >= target.num_layers for tap in head.tap_layers):
        raise FailedPreconditionError(
            f"{path}: the head taps layers {head.tap_layers}, the target has {target.num_layers}",
            reason="FEATURE_MISMATCH",
        )
    if head.target_hidden_size != target.hidden_size:
        raise FailedPreconditionError(
            f"{path}: the head reads features of width {head.target_hidden_size}, the target's "
            f"are {target.hidden_size} wide",
            reason="FEATURE_MISMATCH",
        )


def uses_head_embedding(
    path: Path, head: HeadConfig, has_own: bool, target_width: int | None
) -> bool:
    """Return whether a head uses the embedding of its own checkpoint instead of the target's.

    `has_own` says whether the checkpoint contains an embedding. `target_width` is the width of the
    target's embedding; None if there is none. Raises InvalidRequestError (INVALID_HEAD) if neither
    embedding fits.
    """
    is_shared = target_width == head.hidden_size
    if has_own and (not is_shared or head.target_hidden_size != head.hidden_size):
        return True
    if not is_shared:
        raise _invalid(
            path,
            f"the head needs an embedding of width {head.hidden_size}: the checkpoint carries no "
            f"embed_tokens, and the width of the target's is {target_width}",
        )
    return False


def _spec(*shape: int, required: bool = True) -> TensorSpec:
    return TensorSpec(shape=shape, is_required=required)


def _invalid(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {why}", reason=REASON)
