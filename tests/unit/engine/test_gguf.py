"""GGUF files written here load to the same model as the safetensors they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.engine.gguf import TENSOR_TYPES, open_gguf, separate_pairs
from outrider.engine.layers import interleave_pairs
from outrider.engine.model_loader import load_target
from outrider.errors import InvalidRequestError
from tests.unit.engine.checkpoints import BASE, chain, random_ids, run, write_checkpoint

F32 = gguf.GGMLQuantizationType.F32


def write_gguf(
    checkpoint: Path,
    target: Path,
    arch: str = "llama",
    *,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, Any] | None = None,
    numbers: dict[str, int] | None = None,
    tensors: dict[str, Any] | None = None,
    dtypes: dict[str, Any] | None = None,
) -> None:
    """Write a GGUF as the usual converter lays it out; `types` maps name parts to quantisations,
    `dtypes` to element types, and `extra`, `numbers` and `tensors` are added."""
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_context_length(512)
    writer.add_embedding_length(BASE["hidden_size"])
    writer.add_block_count(BASE["num_hidden_layers"])
    writer.add_feed_forward_length(BASE["intermediate_size"])
    writer.add_head_count(BASE["num_attention_heads"])
    writer.add_head_count_kv(BASE["num_key_value_heads"])
    writer.add_key_length(BASE["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    for key, number in (numbers or {}).items():
        writer.add_uint32(key, number)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, BASE["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave_pairs(tensor, BASE["head_dim"])
        kind = next((t for part, t in (types or {}).items() if part in stored), F32)
        data = tensor.numpy() if kind is F32 else gguf.quants.quantize(tensor.numpy(), kind)
        dtype = next((t for part, t in (dtypes or {}).items() if part in stored), None)
        data = data if dtype is None else data.astype(dtype)
        writer.add_tensor(stored, data, raw_dtype=None if kind is F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(path: Path) -> torch.Tensor:
    target = load_target(path, kv_tokens=16)
    return run(target, [chain(target.pool.allocate(8), 8)], random_ids(8)).logits


@pytest.mark.parametrize(
    ("family", "arch"),
    [("llama", "llama"), ("llama-tied", "llama"), ("qwen2", "qwen2")],
)
def test_a_gguf_equals_the_checkpoint_it_was_made_from(
    family: str, arch: str, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", arch)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), logits_of(tmp_path))
    config = open_gguf(tmp_path / "model.gguf").config
    assert (config.bos_id, config.eos_ids, config.rms_norm_eps) == (1, (2,), 1e-6)


def test_pairs_that_are_separated_again_are_as_before() -> None:
    for shape in ((48, 5), (48,)):
        weight = torch.randn(shape)
        assert torch.equal(separate_pairs(interleave_pairs(weight, 8), 8), weight)
        assert not torch.equal(interleave_pairs(weight, 8), weight)


def test_quantised_tensors_are_dequantised_by_the_formula_of_their_format(tmp_path: Path) -> None:
    """Q8_0: scale * q. Q4_1: scale * q + minimum. Blocks of 32, fp16 scales."""
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    for add, value in (
        (writer.add_context_length, 512), (writer.add_embedding_length, 64),
        (writer.add_block_count, 1), (writer.add_feed_forward_length, 1),
        (writer.add_head_count, 4), (writer.add_layer_norm_rms_eps, 1e-6),
    ):  # fmt: skip
        add(value)
    codes = np.arange(-32, 32, dtype=np.int8)
    halves = np.array([0.5, 0.25], dtype=np.float16)
    blocks = [halves[i : i + 1].tobytes() + codes[32 * i :][:32].tobytes() for i in (0, 1)]
    q8 = np.frombuffer(b"".join(blocks), dtype=np.uint8)[None]
    writer.add_tensor("token_embd.weight", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    # In a Q4_1 block byte i holds value i in its low nibble and value i + 16 in its high one.
    scale_min = np.array([0.125, -3.0], dtype=np.float16).tobytes()
    nibbles = np.array([i | ((15 - i) << 4) for i in range(16)], dtype=np.uint8).tobytes()
    q4 = np.frombuffer((scale_min + nibbles) * 2, dtype=np.uint8)[None]
    writer.add_tensor("blk.0.ffn_gate.weight", q4, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((64, 64), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((1, 64), dtype=np.float32))
    writer.add_tensor("blk.0.ffn_down.weight", np.zeros((64, 1), dtype=np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_gguf(tmp_path / "q.gguf")
    scales = torch.tensor([0.5] * 32 + [0.25] * 32)
    expected_q8 = torch.from_numpy(codes).float() * scales
    assert torch.equal(source.get("model.embed_tokens.weight")[0], expected_q8)
    ramp = torch.arange(16.0)
    expected_q4 = torch.cat([ramp, 15 - ramp]).repeat(2) * 0.125 - 3.0
    assert torch.equal(source.get("model.layers.0.mlp.gate_proj.weight")[0], expected_q4)


@pytest.mark.parametrize("keep", [0, 3, 24, 300, 2000, -500])
def test_a_damaged_file_is_refused(keep: int, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidRequestError, match="GGUF file: ") as caught:
        load_target(file, kv_tokens=16)
    assert "unpack" not in caught.value.message and str(file) in caught.value.message


def test_a_foreign_file_and_a_foreign_architecture_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model at all, but long enough to be read as one")
    with pytest.raises(InvalidRequestError, match="GGUF"):
        open_gguf(tmp_path / "text.gguf")
    write_checkpoint("llama", tmp_path)
    write_gguf(tmp_path, tmp_path / "bert.gguf", "bert")
    with pytest.raises(InvalidRequestError, match="model_type"):
        open_gguf(tmp_path / "bert.gguf")


def test_rope_scaling_that_a_gguf_cannot_tell_is_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    write_gguf(tmp_path, tmp_path / "a.gguf", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(InvalidRequestError, match="rope"):
        open_gguf(tmp_path / "a.gguf")


def write_with(tmp_path: Path, **options: Any) -> Path:
    write_checkpoint("llama", tmp_path)
    write_gguf(tmp_path, tmp_path / "a.gguf", **options)
    return tmp_path / "a.gguf"


def test_a_tensor_without_a_place_in_the_model_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 48), dtype=np.float32)}
    file = write_with(tmp_path, tensors=extra)
    with pytest.raises(InvalidRequestError, match=r"unexpected .*blk\.0\.ffn_gate_inp\.weight"):
        open_gguf(file)


def test_a_tensor_type_that_is_not_dequantised_is_refused_before_any_is_read(
    tmp_path: Path,
) -> None:
    file = write_with(tmp_path, dtypes={"blk.3.ffn_up": np.dtype(np.float64)})
    with pytest.raises(InvalidRequestError, match=r"up_proj.weight is stored as F64.*Q4_K"):
        open_gguf(file)


def test_every_tensor_type_that_is_named_is_dequantised() -> None:
    for name in TENSOR_TYPES:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        dtype = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
        stored = np.zeros(256 // block * size, dtype=np.uint8).view(dtype)
        assert gguf.quants.dequantize(stored, kind).shape == (256,)


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ({"tokenizer.ggml.eos_token_id": 5000}, "gguf: eos_token_id must be of .*, not 5000"),
        ({"llama.rope.freq_base": 0}, "llama.rope.freq_base must be a finite positive number"),
        ({"llama.attention.head_count": 0}, "head_count must be a positive integer, not 0"),
        ({"llama.attention.sliding_window": 8}, "sliding windows are not supported in GGUF"),
        ({"llama.rope.dimension_count": 4}, "partial_rotary_factor must be 1.0"),
    ],
)
def test_numbers_that_would_change_the_model_are_not_passed_over(
    tmp_path: Path, numbers: dict[str, int], match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        open_gguf(write_with(tmp_path, numbers=numbers))


def test_numbers_that_change_nothing_are_read(tmp_path: Path) -> None:
    numbers = {"llama.attention.sliding_window": 512, "llama.rope.dimension_count": 8}
    assert open_gguf(write_with(tmp_path, numbers=numbers)).config.head_dim == 8
