"""Attention that rotates and writes its new rows itself: the same as doing that first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.engine.kernels.attention import Rotary, rotary_attention, tree_attention_triton
from outrider.engine.kernels.attention_config import AttentionConfig
from outrider.engine.kernels.rotary import rotary_table
from tests.unit.engine.kernels.test_attention import TOLERANCE, _case


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tree": False},
        {"tree": False, "num_nodes": 1},
        {"window": 4},
        {"heads": 8, "kv_heads": 1, "num_nodes": 7},
    ],
    ids=["tree", "chain", "one", "window", "tiles"],
)
def test_it_is_rotation_write_and_attention(
    shape: dict[str, Any], splits: int, interleaved: bool, dtype: torch.dtype
) -> None:
    case = _case(dtype=dtype, **shape)
    num_heads = shape.get("heads", 4)
    generator = torch.Generator().manual_seed(1)
    kv_heads, _, dim = case.keys.shape
    rows = case.q.shape[0]
    qkv = torch.randn(rows, num_heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    positions = case.keywords["positions"]
    table = rotary_table(positions, 1.0 / 100.0 ** (torch.arange(dim // 2) / dim * 2))
    slots = _write_slots(case)
    caches = [(case.keys.clone(), case.values.clone()) for _ in range(2)]
    expected = rotary_attention(
        qkv.clone(),
        table,
        slots,
        *caches[0],
        num_heads=num_heads,
        interleaved=interleaved,
        **case.keywords,
    )
    got = tree_attention_triton(
        qkv,
        *caches[1],
        rotary=Rotary(table, num_heads, interleaved),
        config=AttentionConfig(16, 16, splits, 4, 2),
        **case.keywords,
    )
    atol = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, atol=atol, rtol=atol)
    for mine, theirs in zip(caches[1], caches[0], strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=atol)


def _write_slots(case: Any) -> torch.Tensor:
    """Pool slots of the new rows."""
    keywords = case.keywords
    nodes, block = keywords["num_nodes"], keywords["block_tokens"]
    logical = keywords["context"][:, None] + torch.arange(nodes)
    tables = keywords["tables"][keywords["slots"].long()].long()
    inside = logical < tables.shape[1] * block
    blocks = tables.gather(1, (logical // block).clamp(max=tables.shape[1] - 1).long())
    return torch.where(inside, blocks * block + logical % block, -1).flatten()
