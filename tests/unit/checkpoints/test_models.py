"""Which model checkpoints are refused, by the loader and by the check that loads nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoints.directory import read_model_directory
from outrider.checkpoints.model_config import config_from_hf
from outrider.engine.checkpoint import load_model_config, open_checkpoint
from outrider.engine.model_loader import load_embedding, load_lm_head, load_target
from outrider.engine.training.target import load_target as load_for_training
from outrider.errors import InvalidRequestError, NotFoundError
from tests.unit.checkpoints.files import (
    Q_PROJ,
    Tensors,
    cast_to_float8,
    cast_to_int8,
    edit_config,
    edit_tensors,
    quantize_compressed,
    quantize_fp8,
    quantize_gptq,
    quantize_int8,
)

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
READERS: list[Callable[[Path], object]] = [
    lambda path: read_model_directory(path, compare_all=False),
    lambda path: load_target(path, kv_tokens=16),
    load_embedding,
    load_lm_head,
    lambda path: load_for_training(path, dtype=torch.float32),
]
"""Everything that reads a model."""


@pytest.fixture
def model(tiny_target: Path, tmp_path: Path) -> Path:
    """A model that loads."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_target, directory)
    return directory


def assert_refused(model: Path, match: str) -> None:
    for reader in READERS:
        with pytest.raises(InvalidRequestError, match=match) as caught:
            reader(model)
        assert str(model) in caught.value.message
        assert caught.value.reason == "INVALID_CHECKPOINT"


@pytest.mark.parametrize(
    ("quantization", "change"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, quantize_fp8),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, quantize_compressed),
        ({"compression_config": {"format": "float-quantized"}}, quantize_compressed),
        ({"quantization_config": {"load_in_8bit": True}}, quantize_int8),
        ({"quantization_config": {}}, lambda _: None),
        ({"quantization": {"bits": 4}}, quantize_gptq),
    ],
)
def test_a_quantisation_that_the_config_names_is_refused(
    model: Path, quantization: dict[str, Any], change: Callable[[Tensors], object]
) -> None:
    edit_config(model, quantization)
    edit_tensors(model, change)
    assert_refused(model, "not supported: supported are unquantised")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (quantize_fp8, "unexpected tensor .*q_proj.weight_scale_inv.*supported are unquantised"),
        (quantize_compressed, "unexpected tensor .*q_proj.weight_scale"),
        (quantize_int8, "unexpected tensor .*q_proj.SCB"),
        (quantize_gptq, "unexpected tensor .*q_proj.qweight and 1 more"),
        (cast_to_float8, "stored as F8_E4M3, which is not supported .*F64, F32, F16, BF16"),
        (cast_to_int8, "stored as I8, which is not supported"),
    ],
)
def test_a_quantisation_that_only_tensors_tell_is_refused(
    model: Path, change: Callable[[Tensors], object], match: str
) -> None:
    edit_tensors(model, change)
    assert_refused(model, match)


@pytest.mark.parametrize(
    "name",
    [
        f"{Q_PROJ}.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.00.mlp.up_proj.weight",
        "model.layers.0.block_sparse_moe.gate.weight",
        "lm_head.bias",
        "vision_tower.weight",
    ],
)
def test_a_tensor_without_a_place_in_the_model_is_refused(model: Path, name: str) -> None:
    edit_tensors(model, lambda tensors: tensors.update({name: torch.ones(2)}))
    assert_refused(model, f"unexpected tensor .*{name}")


def drop(*prefixes: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return change


def add_layers(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.0.")]:
        for index in (6, 7):
            copy = tensors[name].clone()
            tensors[name.replace("layers.0.", f"layers.{index}.")] = copy


def strip_prefix(tensors: Tensors) -> None:
    tensors.pop(LM_HEAD, None)
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (add_layers, r"config.json has 6 layers \(num_hidden_layers\), the weights have 8$"),
        (drop("model.layers.4.", "model.layers.5."), "has 6 layers .*, the weights have 4$"),
        (strip_prefix, "the names of the tensors lack the prefix 'model.'"),
        (drop(LM_HEAD), "no tensor 'lm_head.weight': config.json must set tie_word_embeddings"),
    ],
)
def test_the_message_says_in_what_config_and_weights_differ(
    model: Path, change: Callable[[Tensors], object], match: str
) -> None:
    edit_tensors(model, change)
    assert_refused(model, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "the file is empty$"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "is a Git LFS pointer, not the weights: fetch them with `git lfs pull`$",
        ),
        (b"\x02" + bytes(7) + b"[]", "the header is no JSON object$"),
        (b"\x02" + bytes(7) + b"{!", "the header is not valid JSON$"),
        (b"\x08" + bytes(7) + b'{"a": 1}', "something else than a JSON object$"),
        (b"\x09" + bytes(7) + b'{"a": {}}', "data_offsets of a tensor must be a list"),
    ],
)
def test_a_file_that_holds_no_weights_says_what_it_is(
    model: Path, content: bytes, match: str
) -> None:
    (model / "model.safetensors").write_bytes(content)
    assert_refused(model, f"model.safetensors: .*{match}")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": [1]}'])
def test_an_index_without_its_map_says_what_it_must_be(model: Path, content: str) -> None:
    (model / "model.safetensors.index.json").write_text(content)
    assert_refused(model, "it must be a JSON object with the object weight_map")


def test_pickled_weights_of_a_model_are_not_supported(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(NotFoundError, match=r"pytorch_model.bin is not supported.*safetensors"):
        read_model_directory(model)


def test_an_unknown_tensor_in_a_shard_is_refused_whatever_the_index_names(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for shard, members in shards.items():
        save_file({name: tensors[name].clone() for name in members}, model / shard)
    (model / "model.safetensors").unlink()
    index = model / "model.safetensors.index.json"
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    index.write_text(json.dumps({"weight_map": weight_map}))
    open_checkpoint(model)
    index.write_text(json.dumps({"weight_map": weight_map | {EMBEDDING: "b.safetensors"}}))
    assert_refused(model, f"{EMBEDDING} is not in the shard b.safetensors")
    index.write_text(json.dumps({"weight_map": weight_map}))
    shutil.copyfile(model / "b.safetensors", model / "c.safetensors")
    extra = {f"{Q_PROJ}.weight_scale": torch.ones(1)}
    save_file({name: tensors[name].clone() for name in names[20:]} | extra, model / "b.safetensors")
    assert_refused(model, "unexpected tensor .*q_proj.weight_scale")
    (model / "b.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"shard b\.safetensors is missing"):
        read_model_directory(model)


def test_frequencies_that_old_files_store_are_passed_over(model: Path) -> None:
    before = load_target(model, kv_tokens=16).embedding
    frequencies = torch.arange(8, dtype=torch.int64)
    names = (f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(6))
    edit_tensors(model, lambda t: t.update({name: frequencies.clone() for name in names}))
    edit_config(model, {"quantization_config": None})
    assert torch.equal(load_target(model, kv_tokens=16).embedding, before)
    assert read_model_directory(model).config == load_model_config(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_unquantised_dtype_loads(model: Path, dtype: torch.dtype) -> None:
    def cast(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)

    edit_tensors(model, cast)
    for reader in READERS:
        reader(model)


def test_a_missing_output_projection_is_not_replaced_by_the_embedding(model: Path) -> None:
    edit_tensors(model, lambda tensors: tensors.pop(LM_HEAD))
    assert_refused(model, r"no tensor 'lm_head\.weight'")
    edit_config(model, {"tie_word_embeddings": True})
    assert torch.equal(load_lm_head(model), load_embedding(model))


def test_a_copy_of_tied_embeddings_is_allowed_and_another_matrix_is_not(model: Path) -> None:
    edit_config(model, {"tie_word_embeddings": True})
    assert_refused(model, f"{LM_HEAD} is not equal to {EMBEDDING}")
    edit_tensors(model, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}))
    for reader in READERS:
        reader(model)
    edit_tensors(model, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].half()}))
    assert_refused(model, f"{LM_HEAD} is not equal to {EMBEDDING}")


def test_one_other_value_in_a_large_copy_is_found_by_the_loader(model: Path) -> None:
    edit_config(model, {"tie_word_embeddings": True, "vocab_size": 8192})
    table = torch.randn(8192, 64)
    other = table.clone()
    other[4001, 3] += 1
    edit_tensors(model, lambda tensors: tensors.update({EMBEDDING: table, LM_HEAD: other}))
    with pytest.raises(InvalidRequestError, match="is not equal to"):
        load_target(model, kv_tokens=16)
    edit_tensors(model, lambda tensors: tensors.update({LM_HEAD: torch.randn(8192, 64)}))
    with pytest.raises(InvalidRequestError, match="is not equal to"):
        read_model_directory(model, compare_all=False)


def test_the_config_that_is_at_fault_is_named(model: Path) -> None:
    edit_config(model, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(InvalidRequestError, match=r"model/config\.json: rope type must be one of"):
        read_model_directory(model)


@pytest.mark.parametrize(
    "layer_types", [["full_attention", "sliding_attention"], ["full_attention", "linear_attention"]]
)
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_layers_that_attend_differently_are_refused(
    model: Path, kind: str, layer_types: list[str]
) -> None:
    raw = json.loads((model / "config.json").read_text())
    raw |= {"model_type": kind, "sliding_window": 8, "use_sliding_window": True}
    with pytest.raises(InvalidRequestError, match=r"mix full and sliding|layer_types must be of"):
        config_from_hf({**raw, "layer_types": layer_types})


def test_mistral_slides_in_every_layer_unless_it_says_that_none_does(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    raw |= {"model_type": "mistral", "sliding_window": 8}
    assert config_from_hf(raw).sliding_window == 8
    assert config_from_hf({**raw, "layer_types": ["sliding_attention"] * 6}).sliding_window == 8
    assert config_from_hf({**raw, "layer_types": ["full_attention"] * 6}).sliding_window is None


def test_mistral_without_the_key_slides_over_4096_tokens_and_with_null_not_at_all(
    model: Path,
) -> None:
    raw = json.loads((model / "config.json").read_text()) | {"model_type": "mistral"}
    raw.pop("sliding_window", None)
    assert config_from_hf(raw).sliding_window == 4096
    assert config_from_hf({**raw, "sliding_window": None}).sliding_window is None
    assert config_from_hf({**raw, "model_type": "qwen2"}).sliding_window is None
    with pytest.raises(InvalidRequestError, match="mix full and sliding"):
        config_from_hf({**raw, "model_type": "qwen2", "use_sliding_window": True})


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "4", True, [1], 10**400])
@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
def test_a_rope_factor_that_is_no_finite_positive_number_is_refused_by_its_key(
    model: Path, key: str, value: Any
) -> None:
    raw = json.loads((model / "config.json").read_text())
    config_from_hf({**raw, "rope_parameters": LLAMA3})
    with pytest.raises(InvalidRequestError, match=f"^{key} must be a finite positive number, not"):
        config_from_hf({**raw, "rope_parameters": {**LLAMA3, key: value}})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "^factor must be a finite"),
        ({"rope_parameters": {"rope_type": "linear"}}, "^factor is missing"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must exceed"),
        ({"rope_parameters": {"rope_theta": -1.0}, "rope_theta": None}, "rope_theta must be a"),
        ({"rope_theta": 0.0}, "rope_theta must be a finite positive number, not 0.0"),
        ({"rope_scaling": [1]}, "rope_scaling must be a JSON object, not .1."),
    ],
)
def test_a_rotary_embedding_that_is_malformed_is_refused_by_its_key(
    model: Path, changes: dict[str, Any], match: str
) -> None:
    raw = json.loads((model / "config.json").read_text())
    with pytest.raises(InvalidRequestError, match=match):
        config_from_hf({**raw, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"head_dim": None, "num_attention_heads": 0},
        {"hidden_size": 1e400},
        {"rope_scaling": "yarn"},
    ],
)
def test_a_config_that_would_compute_something_else_is_refused(
    model: Path, changes: dict[str, Any]
) -> None:
    edit_config(model, changes)
    with pytest.raises(InvalidRequestError):
        load_model_config(model)
