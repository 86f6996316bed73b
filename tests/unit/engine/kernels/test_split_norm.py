"""A norm split around two products is the norm between them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import (
    HalfNormed,
    add_linear,
    add_linear_triton,
    fused_linear,
    fused_linear_triton,
)
from outrider.engine.kernels.norm import rms_norm_torch

EPS = 1e-3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


def _tensors(rows: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [(torch.randn(*s, generator=generator) / s[-1] ** 0.5).to(dtype) for s in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (7, 16), (17, 32)])
@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_two_products_and_the_norm_between_them(
    gated: bool, split_k: int, rows: int, block_m: int, dtype: torch.dtype
) -> None:
    inner, hidden, out = 48, 40, 24
    first, second = _tensors(rows, dtype, (hidden, inner), (2 * out if gated else out, hidden))
    x, residual = _tensors(rows + 100, dtype, (rows, inner), (rows, hidden))
    # Rows of different sizes, so that a row's quotient cannot be taken for another's.
    residual = residual * torch.arange(1, rows + 1).to(dtype)[:, None]
    weight = 1 + _tensors(3, dtype, (hidden,))[0]
    bias = _tensors(4, dtype, (second.shape[0],))[0]
    config = LinearConfig(block_m, 16, 16, split_k, 4, 2, swap=False)
    total, normed = add_linear_triton(
        x, first, residual, norm_weight=weight, eps=EPS, config=config
    )
    got = fused_linear_triton(normed, second, bias=bias, gated=gated, config=config)
    wide = x.double() @ first.double().T + residual.double()
    expected = rms_norm_torch(wide, weight.double(), EPS) @ second.double().T + bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    scale = expected.abs().max()
    assert (total.double() - wide).abs().max() < TOLERANCE[dtype] * wide.abs().max()
    assert (got.double() - expected).abs().max() < TOLERANCE[dtype] * scale
    assert isinstance(normed, HalfNormed)
    assert normed.squares.shape == (3, rows)


def test_the_sum_goes_where_it_is_wanted() -> None:
    x, first, residual = _tensors(5, torch.float32, (5, 48), (40, 48), (5, 40))
    weight = torch.rand(40)
    config = LinearConfig(16, 16, 16, 1, 4, 2, swap=False)
    room = torch.full((9, 40), 7.0)
    for run in (add_linear, partial(add_linear_triton, config=config)):
        expected, _ = run(x, first, residual.clone(), norm_weight=weight, eps=EPS)
        room.fill_(7.0)
        total, _ = run(x, first, residual.clone(), norm_weight=weight, eps=EPS, out=room[:5])
        assert total.data_ptr() == room.data_ptr()
        assert torch.equal(room[:5], expected) and bool((room[5:] == 7.0).all())


def test_on_a_cpu_the_norm_is_whole() -> None:
    x, first, residual = _tensors(5, torch.float32, (5, 8), (6, 8), (5, 6))
    weight = torch.rand(6)
    total, normed = add_linear(x, first, residual, norm_weight=weight, eps=EPS)
    assert isinstance(normed, torch.Tensor)
    torch.testing.assert_close(total, x @ first.T + residual)
    torch.testing.assert_close(normed, rms_norm_torch(total, weight, EPS))
    second = torch.rand(3, 6)
    torch.testing.assert_close(fused_linear(normed, second), normed @ second.T)
