"""Reading head configurations of both formats, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.heads import default_tap_layers, load_head, load_head_config
from outrider.engine.heads.layers import scaled_inverse_frequencies
from outrider.errors import InvalidRequestError
from tests.unit.engine.heads_oracle import HIDDEN, VOCAB, write_eagle, write_eagle3


def edit(directory: Path, changes: dict[str, Any]) -> None:
    """Change keys of a written config; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_original_format_taps_are_outputs_of_the_named_layers(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    assert load_head_config(tmp_path).tap_layers == (1, 2, 3)
    assert load_head_config(tmp_path / "config.json").kind == "eagle3"


def test_speculators_ids_count_residual_streams_and_a_fourth_is_dropped(tmp_path: Path) -> None:
    write_eagle3(tmp_path, speculators=True)
    assert load_head_config(tmp_path).tap_layers == (1, 2, 3)


def test_default_taps_need_the_number_of_target_layers(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    edit(tmp_path, {"eagle_config": {}})
    with pytest.raises(InvalidRequestError, match="pass num_target_layers"):
        load_head_config(tmp_path)
    assert load_head_config(tmp_path, num_target_layers=30).tap_layers == (1, 14, 26)
    with pytest.raises(ValueError, match="at least 6 layers, not 5"):
        default_tap_layers(5)


def test_eagle_1_config_is_recognised(tmp_path: Path) -> None:
    write_eagle(tmp_path)
    config = load_head_config(tmp_path)
    assert (config.kind, config.draft_vocab_size, config.fc_bias) == ("eagle", VOCAB, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be one of"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be one of"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type must be one of"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size must be within"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        (
            {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "has two meanings",
        ),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path)
    edit(tmp_path, changes)
    with pytest.raises(InvalidRequestError, match=message):
        load_head_config(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "d2t", "midlayer.mlp.up_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write_eagle3(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=name):
        load_head(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN))


def test_a_map_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] += VOCAB
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        load_head(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN))


def test_an_own_embedding_is_used_only_where_the_targets_does_not_fit(tmp_path: Path) -> None:
    checkpoint = write_eagle3(tmp_path, speculators=True)
    own = torch.from_numpy(checkpoint.embedding).float()
    features, token = torch.ones(1, HIDDEN), torch.tensor([5])
    expected = load_head(tmp_path, embedding=own).inputs(token, features)
    alone = load_head(tmp_path, embedding=None).inputs(token, features)
    wider = load_head(tmp_path, embedding=torch.zeros(VOCAB, 2 * HIDDEN)).inputs(token, features)
    other = load_head(tmp_path, embedding=own + 1).inputs(token, features)
    assert torch.equal(alone, expected)
    assert torch.equal(wider, expected)
    assert not torch.equal(other, expected)


def test_eagle_needs_the_targets_lm_head(tmp_path: Path) -> None:
    write_eagle(tmp_path)
    with pytest.raises(InvalidRequestError, match="pass the target's lm_head"):
        load_head(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN))


def test_pickled_weights_load_too(tmp_path: Path) -> None:
    checkpoint = write_eagle3(tmp_path)
    embedding = torch.from_numpy(checkpoint.embedding)
    expected = load_head(tmp_path, embedding=embedding).fingerprint
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert load_head(tmp_path, embedding=embedding).fingerprint == expected


def test_llama3_scaling_leaves_high_frequencies_and_divides_low_ones() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = scaled_inverse_frequencies(128, 500000.0, None)
    scaled = scaled_inverse_frequencies(128, 500000.0, scaling)
    assert torch.equal(scaled[:8], plain[:8])
    torch.testing.assert_close(scaled[-8:], plain[-8:] / 8)
    assert torch.equal(
        scaled_inverse_frequencies(128, 500000.0, {"rope_type": "linear", "factor": 4.0}),
        plain / 4,
    )
