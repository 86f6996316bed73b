"""Draft-head configuration (`HeadConfig`), read from a checkpoint's `config.json`.

Two file formats are supported: the original EAGLE one (a flat Llama config) and the `speculators`
one (the Llama config nested in `transformer_layer_config`).

A tap is an auxiliary hidden state layer: a layer of the target whose output residual stream is
recorded as a feature for the head. Taps of both formats are converted to 0-based layer ids. The tap
FINAL_NORM (-1) is not a layer but the hidden state after the target's final norm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from outrider.checkpoints.fields import read_mapping, read_positive, read_size
from outrider.checkpoints.quantization import check_unquantized
from outrider.checkpoints.rope import read_rope
from outrider.errors import InvalidRequestError

FINAL_NORM: Final = -1
"""Tap id of the hidden state after the target's final norm, which EAGLE-1/2 heads read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of a draft head: its sizes, its taps and the variant of its architecture."""

    kind: Literal["eagle3", "eagle"]
    """`eagle3`: EAGLE-3, with several taps and its own lm_head. `eagle`: EAGLE-1/2, with the tap
    FINAL_NORM and the target's lm_head."""
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    """Size of the target's vocabulary."""
    draft_vocab_size: int
    """Number of ids that the head can draft, which is the number of rows of its lm_head. It equals
    `vocab_size` if the head has no vocabulary of its own."""
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int
    tap_layers: tuple[int, ...]
    """Taps in the order in which their features are concatenated: 0-based ids of target layers, or
    FINAL_NORM alone."""
    fc_norm: bool = False
    """Whether each tapped feature has an RMSNorm of its own, which is applied before the
    concatenation."""
    norm_before_fc: bool = False
    """Whether an RMSNorm is applied to the concatenated features (`input_norm` in checkpoints)."""
    norm_output: bool = False
    """Whether the feature for the next draft step is the head's output after its final norm. If
    not, it is the output before this norm."""
    norm_before_residual: bool = False
    """Whether the residual branch of the head's layer starts from the feature after its norm. If
    not, it starts from the feature before this norm."""
    has_input_norm: bool = True
    """Whether the head's layer applies an RMSNorm to the input of its attention. EAGLE-1/2 heads
    usually do not."""
    fc_bias: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "target_hidden_size", "intermediate_size", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.head_dim % 2:
            raise ValueError(
                f"num_attention_heads ({self.num_heads}) and num_key_value_heads "
                f"({self.num_kv_heads}) must be "
                f"positive, and head_dim ({self.head_dim}) must be even"
            )
        if self.kind == "eagle" and self.tap_layers != (FINAL_NORM,):
            raise ValueError(f"an eagle head taps ({FINAL_NORM},) only, not {self.tap_layers}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"not {self.num_heads} and {self.num_kv_heads}"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: set at most one")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be within 1..{self.vocab_size}, not {self.draft_vocab_size}"
            )

    @property
    def num_taps(self) -> int:
        """Number of taps, whose features are concatenated for each position."""
        return len(self.tap_layers)


def default_tap_layers(num_target_layers: int) -> tuple[int, int, int]:
    """Return the default taps of EAGLE-3 for a target of L layers: a low, a middle and a high
    layer, with the 0-based ids 1, L//2-1 and L-4."""
    if num_target_layers < 6:
        raise ValueError(
            f"the default taps need a target of at least 6 layers, not {num_target_layers}: "
            "name them in eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return (1, num_target_layers // 2 - 1, num_target_layers - 4)


def load_head_config(path: str | Path, *, num_target_layers: int | None = None) -> HeadConfig:
    """Read the configuration of a head in either format. `path` is its `config.json` or the
    directory that contains this file.

    If the file names no taps, the default taps for `num_target_layers` are used. Raises
    InvalidRequestError (INVALID_HEAD) for a file that is missing, malformed or not supported.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        return _from_json(json.loads(file.read_text(encoding="utf-8")), num_target_layers)
    except InvalidRequestError as error:
        raise _invalid(file, error.message) from error
    except LookupError as error:
        raise _invalid(file, f"missing field: {error}") from error
    except (ValueError, TypeError, ArithmeticError, AttributeError, OSError) as error:
        raise _invalid(file, str(error)) from error


def _invalid(file: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{file}: {why}", reason="INVALID_HEAD")


def _from_json(raw: Any, num_target_layers: int | None) -> HeadConfig:
    if not isinstance(raw, dict):
        raise ValueError("expected a JSON object")
    check_unquantized(raw)
    if "transformer_layer_config" in raw:
        return _from_speculators(raw, num_target_layers)
    return _from_original(raw, num_target_layers)


def _from_speculators(raw: dict[str, Any], num_target_layers: int | None) -> HeadConfig:
    kind = raw.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type must be 'eagle3', not {kind!r}")
    layer = dict(read_mapping(raw, "transformer_layer_config"))
    check_unquantized(layer)
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    # This format counts residual streams: id j is the output of layer j - 1, and 0 the embedding.
    taps = tuple(i - 1 for i in _layer_ids(ids)) if ids else _default_taps(num_target_layers)
    if any(t < 0 for t in taps):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids must all be at least 1, not {ids}")
    # This format leaves the flag out where it is true; the original format where it is false.
    flags = {k: raw[k] for k in _FLAGS if raw.get(k) is not None}
    merged = {"norm_before_residual": True, **layer, **flags}
    merged["draft_vocab_size"] = raw.get("draft_vocab_size")
    merged["target_hidden_size"] = raw.get("target_hidden_size")
    # Training in this format appends a fourth id, that of the target's last layer: its output is
    # the training target and no input of the head.
    return _build(merged, "eagle3", taps[:3])


_FLAGS: Final = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def _from_original(raw: dict[str, Any], num_target_layers: int | None) -> HeadConfig:
    eagle = read_mapping(raw, "eagle_config")
    kind = _original_kind(raw)
    if kind == "eagle":
        return _build(raw, "eagle", (FINAL_NORM,))
    if eagle.get("use_aux_hidden_state") is False:
        raise ValueError("eagle_config.use_aux_hidden_state must be true for an EAGLE-3 head")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not ids and raw.get("eagle_aux_hidden_state_layer_ids"):
        raise ValueError(
            "eagle_aux_hidden_state_layer_ids at the top level has two meanings in the wild: put "
            "it under eagle_config (0-based layers whose output is recorded)"
        )
    taps = _layer_ids(ids) if ids else _default_taps(num_target_layers)
    if any(t < 0 for t in taps):
        raise ValueError(f"tap layers must be 0-based layer ids, not {taps}")
    merged = {**raw, **{k: eagle[k] for k in _FLAGS if k in eagle}}
    return _build(merged, "eagle3", taps)


def _original_kind(raw: dict[str, Any]) -> Literal["eagle3", "eagle"]:
    name = " ".join(str(a) for a in _list_of(raw, "architectures")).lower()
    if "eagle3" in name or "eagle_config" in raw or raw.get("draft_vocab_size"):
        return "eagle3"
    return "eagle"


def _layer_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids must be a list of layer ids, not {ids!r}"
        )
    return tuple(ids)


def _list_of(raw: dict[str, Any], key: str) -> list[Any]:
    value = raw.get(key) or []
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list, not {value!r}")
    return value


def _default_taps(num_target_layers: int | None) -> tuple[int, ...]:
    if num_target_layers is None:
        raise ValueError(
            "the config names no tap layers: pass num_target_layers to take the default ones"
        )
    return default_tap_layers(num_target_layers)


def _build(
    raw: dict[str, Any], kind: Literal["eagle3", "eagle"], taps: tuple[int, ...]
) -> HeadConfig:
    _check_supported(raw)
    hidden, heads = read_size(raw, "hidden_size"), read_size(raw, "num_attention_heads")
    vocab = read_size(raw, "vocab_size")
    theta, scaling = read_rope(raw)
    eagle = kind == "eagle"
    return HeadConfig(
        kind=kind,
        hidden_size=hidden,
        target_hidden_size=read_size(raw, "target_hidden_size", hidden),
        intermediate_size=read_size(raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=read_size(raw, "num_key_value_heads", heads),
        head_dim=read_size(raw, "head_dim", hidden // heads),
        rms_norm_eps=read_positive(raw, "rms_norm_eps", 1e-6),
        vocab_size=vocab,
        draft_vocab_size=vocab if eagle else read_size(raw, "draft_vocab_size", vocab),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=read_size(raw, "max_position_embeddings", 2048),
        tap_layers=taps,
        fc_norm=bool(raw.get("fc_norm")),
        norm_before_fc=bool(raw.get("norm_before_fc")),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        has_input_norm=not eagle,
        fc_bias=bool(raw.get("bias", True)) if eagle else bool(raw.get("fc_bias")),
        qkv_bias=bool(raw.get("qkv_bias", raw.get("attention_bias"))),
    )


def _check_supported(raw: dict[str, Any]) -> None:
    """Raise ValueError for variants that would be loaded without an error but computed wrongly."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "num_hidden_layers": (1,),
        "model_type": ("llama", "qwen2", "qwen3_eagle", "mistral", "eagle"),
        "mlp_bias": (False,),
    }
    for key, values in allowed.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise ValueError(f"{key} must be one of {list(values)}, not {raw[key]!r}")
