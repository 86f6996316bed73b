"""Attention that rotates and writes its new rows itself, on the device, at real shapes."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.kernels.attention import rotary_attention, tree_attention
from outrider.engine.kernels.layout import tree_layout
from outrider.engine.kernels.rotary import rotary_table, rotary_write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCK = 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("num_nodes", [1, 64])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64)])
def test_it_is_rotation_write_and_attention(
    heads: tuple[int, int, int], num_nodes: int, batch: int, dtype: torch.dtype
) -> None:
    num_heads, kv_heads, dim = heads
    device = torch.device("cuda", 0)
    torch.manual_seed(batch)
    width = 640 // BLOCK
    tables = torch.randperm(batch * width, device=device).int().view(batch, width)
    slots = torch.randperm(batch, device=device).int()
    context = torch.randint(0, 500, (batch,), device=device, dtype=torch.int32)
    layout = tree_layout(None, context, tables, slots, num_nodes=num_nodes, block_tokens=BLOCK)
    shape = (batch * num_nodes, num_heads + 2 * kv_heads, dim)
    qkv = torch.randn(shape, device=device, dtype=dtype)
    cache = torch.randn(2, kv_heads, batch * width * BLOCK, dim, device=device, dtype=dtype)
    frequencies = 1.0 / 500_000.0 ** (torch.arange(dim // 2, device=device) / dim * 2)
    table = rotary_table(layout.positions, frequencies)
    shared = {
        "tables": tables,
        "slots": slots,
        "context": context,
        "num_nodes": num_nodes,
        "mask": layout.mask,
        "block_tokens": BLOCK,
        "positions": layout.positions,
        "max_len": 640,
    }
    theirs, mine = cache.clone(), cache.clone()
    query = rotary_write(
        qkv.clone(), table, layout.write_slots, *theirs, num_heads=num_heads, interleaved=True
    )
    expected = tree_attention(query, *theirs, **shared)  # type: ignore[arg-type]
    got = rotary_attention(
        qkv, table, layout.write_slots, *mine, num_heads=num_heads, interleaved=True, **shared
    )  # type: ignore[arg-type]
    # The two kernels may contract a product and a sum differently: one unit in the last place.
    torch.testing.assert_close(mine, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < {torch.float32: 1e-5}.get(dtype, 5e-3)
