"""The widened model: the same function at another cost, and no zeros where a kernel reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from outrider_bench.gpu.support.widened_files import write_head, write_target
from outrider_bench.gpu.support.widening import (
    LAYER_MATRICES,
    WidenedTarget,
    WideSpec,
    weight_bytes,
    widen_target,
)
from safetensors.torch import load_file

from outrider.checkpoints.model_config import config_from_hf
from outrider.engine.checkpoint import load_model_config, open_checkpoint
from outrider.engine.heads import load_feature_projection, load_head
from outrider.engine.heads.eagle3 import Eagle3Head
from outrider.engine.model_loader import load_target
from outrider.engine.target import ForwardBatch, Segment, TargetModel
from outrider.errors import InvalidRequestError

SPEC = WideSpec(hidden_size=160, intermediate_size=200, num_layers=8, num_heads=9, num_kv_heads=3)
TAPS = (1, 2)
TOKENS = torch.tensor([5, 9, 300, 17, 2, 64, 101])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, tiny_head: Path) -> Path:
    out = tmp_path_factory.mktemp("wide")
    write_target(tiny_target, out / "target", SPEC, dtype=torch.float32)
    write_head(tiny_head, tiny_target, out / "head", SPEC, dtype=torch.float32)
    return out


def _forward(
    model: TargetModel, tokens: torch.Tensor, taps: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    sequence = model.pool.allocate(len(tokens))
    segment = Segment(sequence=sequence, num_rows=len(tokens), positions=torch.arange(len(tokens)))
    output = model.forward(ForwardBatch(token_ids=tokens, segments=[segment]), tap_layers=taps)
    sequence.release()
    return output.logits, output.taps


def _greedy(model: TargetModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_forward(model, torch.tensor(tokens))[0][-1].argmax()))
    return tokens


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() <= 1e-5 * expected.abs().max())


def test_logits_features_and_drafts_do_not_change(
    tiny_target: Path, tiny_head: Path, wide: Path
) -> None:
    small, large = load_target(tiny_target), load_target(wide / "target")
    projection = load_feature_projection(tiny_head)
    wide_projection = load_feature_projection(wide / "head")
    assert wide_projection.tap_layers == projection.tap_layers
    logits, taps = _forward(small, TOKENS, projection.tap_layers)
    wide_logits, wide_taps = _forward(large, TOKENS, projection.tap_layers)
    assert _close(wide_logits, logits)
    assert taps is not None and wide_taps is not None
    features, wide_features = projection(taps), wide_projection(wide_taps)
    assert _close(wide_features[:, :64], features)
    assert not wide_features[:, 64:].any()
    head = load_head(tiny_head, embedding=small.embedding)
    wide_head = load_head(wide / "head", embedding=large.embedding)
    assert isinstance(head, Eagle3Head) and isinstance(wide_head, Eagle3Head)
    expected = _draft_logits(head, features)
    assert _close(_draft_logits(wide_head, wide_features), expected)
    assert torch.equal(head.target_ids, wide_head.target_ids)


def _draft_logits(head: Eagle3Head, features: torch.Tensor) -> torch.Tensor:
    """Draft logits of every position, by plain causal attention."""
    count = len(features) - 1
    positions = torch.arange(count)
    inputs = head.inputs(TOKENS[1:], features[:count])
    keys, values = head.kv(inputs, features[:count], positions)
    query = head.query(inputs, positions)
    group = query.shape[1] // keys.shape[1]
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.repeat_interleave(group, 1).transpose(0, 1),
        values.repeat_interleave(group, 1).transpose(0, 1),
        is_causal=True,
    ).transpose(0, 1)
    return head.logits(head.finish(head.residual(inputs, features[:count]), attended))


def test_greedy_text_does_not_change(tiny_target: Path, wide: Path) -> None:
    small, large = load_target(tiny_target), load_target(wide / "target")
    for prompt in ([3, 4, 5], [200, 11], [90, 91, 92, 93]):
        assert _greedy(large, prompt, 24) == _greedy(small, prompt, 24)


def test_zeros_are_only_where_they_must_be(tiny_target: Path, wide: Path) -> None:
    """Rows that write to dead dimensions, columns that read dead heads: nothing else is zero."""
    config = load_model_config(wide / "target")
    source = open_checkpoint(wide / "target")
    for layer in range(config.num_layers):
        for part, (rows, _) in LAYER_MATRICES.items():
            weight = source.get(f"model.layers.{layer}.{part}.weight")
            if rows == "hidden":
                assert not weight[64:].any()
                assert layer >= 6 or weight[:64].any()
            else:
                assert weight.any(dim=1).all() and weight.any(dim=0).all()
                assert (weight == 0).float().mean() < 1e-3
        for norm in ("input_layernorm", "post_attention_layernorm"):
            assert (source.get(f"model.layers.{layer}.{norm}.weight") != 0).all()
    assert (source.get("lm_head.weight") == 0).float().mean() < 1e-3
    assert not source.get("model.embed_tokens.weight")[:, 64:].any()


def test_no_zeros_in_the_head_but_for_its_outputs(wide: Path) -> None:
    tensors = load_file(wide / "head" / "model.safetensors")
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d") or name.endswith(("o_proj.weight", "down_proj.weight")):
            continue
        live = tensor[:64] if name == "fc.weight" else tensor
        assert (live == 0).float().mean() < 1e-3, name
    assert not tensors["fc.weight"][64:].any()


def test_tensors_are_the_same_in_memory_and_on_disk(tiny_target: Path, wide: Path) -> None:
    config = load_model_config(tiny_target)
    raw, tensors = widen_target(
        open_checkpoint(tiny_target),
        config,
        SPEC,
        torch.Generator().manual_seed(0),
        dtype=torch.float32,
    )
    assert config_from_hf(raw) == load_model_config(wide / "target")
    stored = open_checkpoint(wide / "target")
    for name, tensor in tensors:
        assert torch.equal(stored.get(name), tensor), name


def test_bytes_are_those_of_the_projections() -> None:
    """The 8B shape: what numbers.md states for 128,256 ids, and less for SmolLM2's vocabulary."""
    shape = config_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )
    assert weight_bytes(shape) == pytest.approx(15.01e9, rel=1e-3)


def test_what_does_not_fit_is_refused(tiny_target: Path) -> None:
    config = load_model_config(tiny_target)
    narrow = WideSpec(hidden_size=32, num_layers=8, num_heads=9, num_kv_heads=3)
    with pytest.raises(InvalidRequestError, match="hidden_size"):
        WidenedTarget(open_checkpoint(tiny_target), config, narrow)
    with pytest.raises(InvalidRequestError, match="no tensor"):
        WidenedTarget(open_checkpoint(tiny_target), config, SPEC).get("model.layers.8.x.weight")
