"""Loading checkpoints: formats, sharding, and what is said about damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoints.model_config import config_from_hf
from outrider.engine.checkpoint import load_model_config
from outrider.engine.model_loader import (
    kv_bytes_per_token,
    load_embedding,
    load_lm_head,
    load_target,
)
from outrider.errors import InvalidRequestError, NotFoundError
from tests.unit.engine.checkpoints import (
    BASE,
    LLAMA3_ROPE,
    chain,
    random_ids,
    run,
    write_checkpoint,
)

LLAMA = {**BASE, "model_type": "llama"}


def logits_of(path: Path) -> torch.Tensor:
    target = load_target(path, kv_tokens=16)
    return run(target, [chain(target.pool.allocate(8), 8)], random_ids(8)).logits


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "single")
    write_checkpoint("llama", tmp_path / "sharded", shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(tmp_path / "sharded"), logits_of(tmp_path / "single"))


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_embedding_and_lm_head_load_without_the_rest(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(family, tmp_path)
    embedding, lm_head = load_embedding(tmp_path), load_lm_head(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    assert torch.equal(lm_head, model.lm_head.weight.to(torch.bfloat16))
    assert torch.equal(load_target(tmp_path, kv_tokens=16).embedding, embedding)


def test_the_pool_has_the_size_that_was_asked_for(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    target = load_target(tmp_path, kv_tokens=50, block_tokens=16, dtype=torch.bfloat16)
    assert target.pool.total_blocks == 4
    stored = target.pool.storage.numel() * target.pool.storage.itemsize
    assert stored == 64 * kv_bytes_per_token(target.config, torch.bfloat16)


def test_end_of_sequence_ids_of_both_files_count(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_model_config(tmp_path).eos_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text("not json")
    assert load_model_config(tmp_path).eos_ids == (2,)


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such model directory"):
        load_target(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="holds neither"):
        load_target(tmp_path)
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(NotFoundError, match="no such file"):
        load_target(tmp_path / "model.gguf")


def test_a_missing_shard_is_not_found(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, shard_size="60KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(NotFoundError, match="shard"):
        load_target(tmp_path, kv_tokens=16)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../a.safetensors"}}'])
def test_a_damaged_index_is_refused(index: str, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidRequestError, match="index"):
        load_target(tmp_path, kv_tokens=16)


@pytest.mark.parametrize("keep", [0, 5, 400, 20_000])
def test_a_truncated_weight_file_is_refused(keep: int, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidRequestError, match="damaged"):
        load_target(tmp_path, kv_tokens=16)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dropped = {k: v for k, v in tensors.items() if "layers.2.mlp.up_proj" not in k}
    save_file(dropped, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequestError, match=r"layers\.2\.mlp\.up_proj"):
        load_target(tmp_path, kv_tokens=16)
    save_file(tensors, tmp_path / "model.safetensors")
    for key, value in {"intermediate_size": 64, "vocab_size": 98, "head_dim": 4}.items():
        original = load_model_config(tmp_path)
        edit_config(tmp_path, **{key: value})
        with pytest.raises(InvalidRequestError, match="must have shape"):
            load_target(tmp_path, kv_tokens=16)
        edit_config(tmp_path, **{key: getattr(original, key)})


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidRequestError, match=r"config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": None}, "^hidden_size is missing"),
        ({"hidden_size": "wide"}, "^hidden_size must be a positive integer, not 'wide'"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"num_attention_heads": 0}, "must be"),
        ({"head_dim": 7}, "even"),
        ({"num_hidden_layers": 0}, "positive"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
            "sliding",
        ),
    ],
)
def test_an_unsupported_config_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        config_from_hf({**LLAMA, **changes})


def test_old_and_new_spellings_of_rope_scaling_mean_the_same() -> None:
    old = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 10000.0, "rope_scaling": old},
        {"rope_theta": 10000.0, "rope_scaling": {**old, "type": "llama3"}},
    ]
    configs = [config_from_hf({**LLAMA, **spelling}) for spelling in spellings]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope_scaling is not None
    assert configs[0].rope_scaling["factor"] == 8.0


def test_qwen_layers_that_all_slide_or_none_are_understood() -> None:
    qwen = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert config_from_hf({**qwen, "layer_types": ["sliding_attention"] * 4}).sliding_window == 8
    assert config_from_hf({**qwen, "layer_types": ["full_attention"] * 4}).sliding_window is None
    assert config_from_hf({**qwen, "use_sliding_window": False}).sliding_window is None
