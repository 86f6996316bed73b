"""Which draft heads are refused, by the loaders and by the check that loads nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.checkpoints.directory import read_model_config
from outrider.checkpoints.head_tensors import read_head
from outrider.engine.heads import load_feature_projection, load_head, load_head_config
from outrider.errors import FailedPreconditionError, InvalidRequestError
from tests.unit.checkpoints.files import Tensors, edit_config, edit_tensors
from tests.unit.engine.heads_oracle import HIDDEN, VOCAB, write_eagle, write_eagle3

WIDTH, IDS = 64, 384
"""Of the tiny target."""


@pytest.fixture
def head(tiny_head: Path, tmp_path: Path) -> Path:
    """A head of the tiny target that loads."""
    directory = tmp_path / "head"
    shutil.copytree(tiny_head, directory)
    return directory


@pytest.fixture
def readers(tiny_target: Path) -> list[Callable[[Path], object]]:
    """Everything that reads a head."""
    return [
        lambda path: read_head(path, read_model_config(tiny_target)),
        lambda path: load_head(path, embedding=torch.zeros(IDS, WIDTH)),
        load_feature_projection,
    ]


Readers = list[Callable[[Path], object]]


def assert_refused(head: Path, readers: Readers, match: str) -> None:
    for reader in readers:
        with pytest.raises(InvalidRequestError, match=match) as caught:
            reader(head)
        assert str(head) in caught.value.message and caught.value.reason == "INVALID_HEAD"


def to_float8(tensors: Tensors) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (to_float8, "fc.weight is stored as F8_E4M3.*supported are unquantised"),
        (
            lambda tensors: tensors.update({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}),
            r"unexpected tensor .*up_proj\.weight_scale",
        ),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.o_proj.bias": torch.ones(WIDTH)}),
            r"unexpected tensor .*o_proj\.bias",
        ),
        (
            lambda tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
            r"unexpected tensor .*q_norm\.weight",
        ),
        (
            lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.ones(2)}),
            r"unexpected tensor .*layers\.1\.mlp\.up_proj\.weight",
        ),
        (lambda tensors: tensors.update({"model.fc.weight": torch.ones(2)}), "mean the same"),
        (lambda tensors: tensors.update({"d2t": torch.ones(256)}), "d2t is stored as F32"),
        (lambda tensors: tensors.update({"norm.weight": torch.ones(3)}), "norm.weight must have"),
        (lambda tensors: tensors.pop("midlayer.hidden_norm.weight"), "hidden_norm"),
    ],
)
def test_tensors_that_a_head_has_not_or_lacks_are_refused(
    head: Path, readers: Readers, change: Callable[[Tensors], object], match: str
) -> None:
    for reader in readers:
        reader(head)
    edit_tensors(head, change)
    assert_refused(head, readers, match)


def test_tensors_of_a_pickle_are_checked_when_it_is_loaded(head: Path, readers: Readers) -> None:
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(tensors, head / "pytorch_model.bin")
    for reader in readers:
        reader(head)
    torch.save({**tensors, "fc.weight_scale": torch.ones(1)}, head / "pytorch_model.bin")
    assert_refused(head, readers[1:], r"unexpected tensor .*fc\.weight_scale")
    torch.save({**tensors, "more": {"nested": 1}}, head / "pytorch_model.bin")
    assert_refused(head, readers[1:], "something else than tensors")
    (head / "pytorch_model.bin").write_bytes(b"no pickle")
    assert_refused(head, readers[1:], "damaged weights")


def test_names_that_published_heads_carry_besides_are_passed_over(
    head: Path, readers: Readers
) -> None:
    def add(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = torch.ones(IDS, WIDTH)
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        assert "t2d" in tensors

    edit_tensors(head, add)
    for reader in readers:
        reader(head)


def test_heads_of_eagle_1_may_carry_copies_of_the_targets_matrices(tmp_path: Path) -> None:
    write_eagle(tmp_path)

    def add(tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
        tensors["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)

    edit_tensors(tmp_path, add)
    table = torch.zeros(VOCAB, HIDDEN)
    load_head(tmp_path, embedding=table, lm_head=table)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.ones(HIDDEN)}))
    with pytest.raises(InvalidRequestError, match=r"unexpected tensor .*norm\.weight"):
        load_head(tmp_path, embedding=table, lm_head=table)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": None}, "config.json: hidden_size is missing$"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'$"),
        ({"eagle_config": [1]}, r"eagle_config must be a JSON object, not \[1\]$"),
        ({"architectures": 5, "eagle_config": None}, "architectures must be a list, not 5$"),
        ({"rope_scaling": [1]}, r"rope_scaling must be a JSON object, not \[1\]$"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.0}, "rope_parameters": None},
            "factor must be a finite positive number, not 0.0$",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "x"}},
            "eagle_aux_hidden_state_layer_ids must be a list of layer ids, not 'x'$",
        ),
    ],
)
def test_a_malformed_field_of_a_head_is_named(
    head: Path, readers: Readers, changes: dict[str, Any], match: str
) -> None:
    edit_config(head, changes)
    assert_refused(head, readers, match)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_size": None},
        {"num_attention_heads": 0, "head_dim": None},
        {"eagle_config": [1]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_a_config_that_is_quantised_or_malformed_is_refused(
    head: Path, readers: Readers, changes: dict[str, Any]
) -> None:
    edit_config(head, changes)
    assert_refused(head, readers, "config.json: ")


def test_a_nested_config_that_is_quantised_is_refused(tmp_path: Path) -> None:
    write_eagle3(tmp_path, speculators=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["transformer_layer_config"]["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InvalidRequestError, match="quantization_config .fp8. is not supported"):
        load_head_config(tmp_path)


@pytest.mark.parametrize("speculators", [True, False])
def test_the_residual_of_a_head_that_does_not_say_is_its_formats(
    tmp_path: Path, speculators: bool
) -> None:
    write_eagle3(tmp_path, speculators=speculators)
    edit_config(tmp_path, {"norm_before_residual": None})
    assert load_head_config(tmp_path).norm_before_residual is speculators
    for said in (True, False):
        edit_config(tmp_path, {"norm_before_residual": said})
        assert load_head_config(tmp_path).norm_before_residual is said


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"vocab_size": 400}, "VOCAB_MISMATCH"),
        ({"hidden_size": 32}, "FEATURE_MISMATCH"),
        ({"num_hidden_layers": 2}, "FEATURE_MISMATCH"),
    ],
)
def test_a_head_for_another_target_is_refused(
    head: Path, tiny_target: Path, tmp_path: Path, target: dict[str, int], reason: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    edit_config(other, target)
    with pytest.raises(FailedPreconditionError) as caught:
        read_head(head, read_model_config(other))
    assert caught.value.reason == reason


def test_a_head_of_another_kind_than_the_method_is_refused(head: Path, tiny_target: Path) -> None:
    target = read_model_config(tiny_target)
    assert read_head(head, target, kind="eagle3").kind == "eagle3"
    with pytest.raises(FailedPreconditionError, match="holds an eagle3 head, not eagle"):
        read_head(head, target, kind="eagle")
