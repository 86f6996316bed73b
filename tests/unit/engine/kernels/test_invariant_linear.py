"""Batch-invariant products: right up to rounding, and the same bits for a row among any others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_table, rotary_write_triton
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import fused_linear_triton
from outrider.engine.kernels.linear.invariant import (
    invariant_config,
    invariant_linear_triton,
)
from outrider.engine.kernels.linear.launch import RotaryOut
from outrider.engine.kernels.norm import silu_mul_triton

N, K = 96, 160
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
KINDS = ("plain", "bias", "gated", "gated bias", "residual", "residual bias", "float32")


def arguments(kind: str, num_rows: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"gated": "gated" in kind}
    if "bias" in kind:
        found["bias"] = torch.randn(N, generator=torch.Generator().manual_seed(1)).bfloat16()
    if "residual" in kind:
        found["residual"] = torch.randn(num_rows, N, generator=generator).bfloat16()
    if kind == "float32":
        found["out_dtype"] = torch.float32
    return found


def random_rows(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, K, generator=generator).bfloat16()


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_row_has_the_same_bits_among_any_others(weight: Tensor, kind: str, num_rows: int) -> None:
    x, others = random_rows(num_rows, 7), arguments(kind, num_rows, 8)
    place = num_rows * 2 // 3
    alone = {**others}
    if "residual" in others:
        alone["residual"] = others["residual"][place : place + 1]
    expected = invariant_linear_triton(x[place : place + 1], weight, **alone)
    got = invariant_linear_triton(x, weight, **others)
    assert torch.equal(got[place : place + 1], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        LinearConfig(16, 32, 32, 1, 4, 2, swap=False),
        LinearConfig(32, 16, 64, 1, 4, 2, swap=True),
        LinearConfig(64, 32, 128, 1, 8, 3, swap=True),
    ],
)
def test_tiles_change_no_bit(weight: Tensor, kind: str, config: LinearConfig) -> None:
    x, others = random_rows(20, 3), arguments(kind, 20, 4)
    got = invariant_linear_triton(x, weight, config=config, **others)
    assert torch.equal(got, invariant_linear_triton(x, weight, **others))


def test_a_split_k_would_be_noticed(weight: Tensor) -> None:
    x = random_rows(16, 5)
    split = invariant_config(x, weight)._replace(split_k=2, block_k=32)
    got = fused_linear_triton(x, weight, config=split, rounded=True, out_dtype=torch.float32)
    expected = invariant_linear_triton(x, weight, out_dtype=torch.float32)
    assert not torch.equal(got, expected)


def cut(values: Tensor) -> Tensor:
    """Round float32 to bfloat16 as the interpreter does: towards zero."""
    return (values.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
def test_one_kernel_rounds_where_several_do(weight: Tensor, kind: str) -> None:
    x, others = random_rows(40, 5), arguments(kind, 40, 6)
    plain = invariant_linear_triton(x, weight, bias=others.get("bias"))
    expected = silu_mul_triton(plain) if others["gated"] else plain
    if "residual" in others:
        expected = cut(expected.float() + others["residual"].float())
    assert torch.equal(invariant_linear_triton(x, weight, **others), expected)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [1, 20, 70])
def test_rotating_in_the_product_or_after_it_gives_the_same_bits(
    biased: bool, num_rows: int
) -> None:
    heads, kv_heads, dim = 2, 1, 32
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn((heads + 2 * kv_heads) * dim, K, generator=generator).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if biased else None
    x = random_rows(num_rows, 2)
    positions = torch.arange(num_rows, dtype=torch.int32) * 37
    table = rotary_table(positions, 10_000.0 ** -torch.linspace(0, 1, dim // 2))
    slots = torch.arange(num_rows)
    config = LinearConfig(32, 32, 32, 1, 4, 2, swap=True)
    results = []
    for is_one_kernel in (False, True):
        keys, values = torch.zeros(2, kv_heads, num_rows, dim, dtype=torch.bfloat16)
        if is_one_kernel:
            rotary = RotaryOut(table, slots, keys, values, heads)
            query = invariant_linear_triton(x, weight, bias=bias, rotary=rotary, config=config)
        else:
            qkv = invariant_linear_triton(x, weight, bias=bias).view(num_rows, -1, dim)
            shared = {"num_heads": heads, "interleaved": True}
            query = rotary_write_triton(qkv, table, slots, keys, values, **shared)  # type: ignore[arg-type]
        results.append((query.reshape(num_rows, -1), keys, values))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_k_is_never_split() -> None:
    for n, k, gated in ((6144, 4096, False), (4096, 14336, False), (576, 1536, False)):
        weight = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
        for num_rows in (1, 20, 64, 300):
            x = torch.empty(num_rows, k, dtype=torch.bfloat16, device="meta")
            assert invariant_config(x, weight, gated=gated).split_k == 1
