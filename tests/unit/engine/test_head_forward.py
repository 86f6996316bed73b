"""Heads against the float64 numpy oracle, drafting a chain with a cache of stable rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.heads import (
    FINAL_NORM,
    DraftHead,
    load_feature_projection,
    load_head,
)
from tests.unit.engine.heads_oracle import (
    DRAFT_VOCAB,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    chain_logits,
    project,
    write_eagle,
    write_eagle3,
)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_output": True},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
]
TOKENS = [3, 17, 39, 0, 8, 8]


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query row over all cached rows."""
    keys, values = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (keys, values))
    scores = torch.einsum("rhd,lhd->rhl", query, keys) * query.shape[-1] ** -0.5
    return torch.einsum("rhl,lhd->rhd", scores.softmax(-1), values)


def draft_chain(
    head: DraftHead, features: Tensor, tokens: list[int], steps: int
) -> tuple[Tensor, list[int]]:
    """Catch-up writes KV for all rows; only the last one goes on; then one row a step."""
    inputs = head.inputs(torch.tensor(tokens), features)
    positions = torch.arange(len(tokens))
    keys, values = head.kv(inputs, features, positions)
    residual = head.residual(inputs, features)[-1:]
    inputs, positions = inputs[-1:], positions[-1:]
    logits, drafted = [], []
    for step in range(steps):
        if step:
            k, v = head.kv(inputs, features, positions)
            keys, values = torch.cat((keys, k)), torch.cat((values, v))
        x = head.finish(residual, attend(head.query(inputs, positions), keys, values))
        logits.append(head.logits(x)[0])
        token = head.to_target_ids(logits[-1].argmax()[None])
        drafted.append(int(token))
        features, positions = x, positions + 1
        inputs = head.inputs(token, features)
        residual = head.residual(inputs, features)
    return torch.stack(logits), drafted


@pytest.mark.parametrize("flags", VARIANTS, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("speculators", [False, True])
def test_eagle3_chain_equals_the_oracle(
    tmp_path: Path, flags: dict[str, Any], speculators: bool
) -> None:
    checkpoint = write_eagle3(tmp_path, flags, speculators=speculators)
    raw = np.random.default_rng(0).normal(size=(len(TOKENS), 3 * HIDDEN))
    embedding = torch.from_numpy(checkpoint.embedding)
    head = load_head(tmp_path, embedding=embedding, dtype=torch.float64)
    projection = load_feature_projection(tmp_path, dtype=torch.float64)
    features = projection(torch.from_numpy(raw))
    expected_features = project(checkpoint.tensors, raw, flags)
    np.testing.assert_allclose(features.numpy(), expected_features, atol=1e-10)
    logits, drafted = draft_chain(head, features, TOKENS, 4)
    expected, tokens = chain_logits(checkpoint, expected_features, TOKENS, 4, flags)
    # The rotation angles are formed in float32, and logits are returned in float32.
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-5)
    assert drafted == tokens


@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_eagle_chain_equals_the_oracle(tmp_path: Path, input_norm: bool, qkv_bias: bool) -> None:
    checkpoint = write_eagle(tmp_path, input_norm=input_norm, qkv_bias=qkv_bias)
    features = np.random.default_rng(1).normal(size=(len(TOKENS), HIDDEN))
    head = load_head(
        tmp_path,
        embedding=torch.from_numpy(checkpoint.embedding),
        lm_head=torch.from_numpy(checkpoint.lm_head),
        dtype=torch.float64,
    )
    projection = load_feature_projection(tmp_path, dtype=torch.float64)
    raw = torch.from_numpy(features)
    assert projection.tap_layers == (FINAL_NORM,)
    assert torch.equal(projection(raw), raw)
    logits, drafted = draft_chain(head, raw, TOKENS, 4)
    expected, tokens = chain_logits(checkpoint, features, TOKENS, 4, {})
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-5)
    assert drafted == tokens


def test_every_draft_id_maps_into_the_vocabulary_once(tmp_path: Path) -> None:
    checkpoint = write_eagle3(tmp_path)
    head = load_head(tmp_path, embedding=torch.from_numpy(checkpoint.embedding))
    assert head.target_ids.tolist() == checkpoint.target_ids.tolist()
    assert len(set(head.target_ids.tolist())) == DRAFT_VOCAB
    assert int(head.target_ids.max()) < VOCAB
    grid = torch.tensor([[0, 1], [2, DRAFT_VOCAB - 1]])
    assert head.to_target_ids(grid).tolist() == checkpoint.target_ids[grid.numpy()].tolist()


def test_logits_are_float32_in_bfloat16(tmp_path: Path) -> None:
    checkpoint = write_eagle3(tmp_path)
    embedding = torch.from_numpy(checkpoint.embedding)
    head = load_head(tmp_path, embedding=embedding, dtype=torch.bfloat16)
    features = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
    inputs = head.inputs(torch.tensor([1, 2]), features)
    assert inputs.dtype == torch.bfloat16
    assert head.logits(features).dtype == torch.float32


def test_both_sides_carry_one_fingerprint_in_any_dtype(tmp_path: Path) -> None:
    checkpoint = write_eagle3(tmp_path / "a")
    embedding = torch.from_numpy(checkpoint.embedding)
    head = load_head(tmp_path / "a", embedding=embedding, dtype=torch.bfloat16)
    assert load_feature_projection(tmp_path / "a").fingerprint == head.fingerprint
    write_eagle3(tmp_path / "b", {"fc_norm": True})
    assert load_feature_projection(tmp_path / "b").fingerprint != head.fingerprint


def test_projection_rejects_features_of_another_width(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    with pytest.raises(ValueError, match=f"must be {3 * HIDDEN} wide, not {HIDDEN}"):
        load_feature_projection(tmp_path)(torch.zeros(1, HIDDEN))
