"""RMSNorm and the gated activation: PyTorch references against float64 formulas, kernels against
the PyTorch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engine.heads import layers
from outrider.engine.kernels.norm import (
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
    silu_mul,
    silu_mul_torch,
    silu_mul_triton,
)
from outrider.errors import InvalidRequestError

# Two roundings to the dtype, a unit in the last place each: the interpreter cuts bfloat16 off.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)
EPS = 1e-5


def _normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_twin_is_the_formula(dtype: torch.dtype) -> None:
    x, weight = _normal(3, 37, dtype=dtype, seed=1), _normal(37, dtype=dtype, seed=2)
    wide = x.double()
    expected = wide / (wide.square().mean(dim=1, keepdim=True) + EPS).sqrt() * weight.double()
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    _assert_near(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_twin_agrees_with_the_heads(dtype: torch.dtype) -> None:
    x, weight = _normal(4, 64, dtype=dtype, seed=3), _normal(64, dtype=dtype, seed=4)
    _assert_near(rms_norm_torch(x, weight, EPS), layers.rms_norm(x, weight, EPS), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 1), (3, 37), (17, 576), (2, 1025)])
def test_rms_norm_kernel_agrees_with_its_twin(dtype: torch.dtype, rows: int, features: int) -> None:
    x = _normal(rows, features, dtype=dtype, seed=5) * 7
    weight = _normal(features, dtype=dtype, seed=6)
    got = rms_norm_triton(x, weight, EPS)
    assert got.dtype == dtype
    _assert_near(got, rms_norm_torch(x, weight, EPS), TOLERANCE[dtype])


def test_large_float16_rows_are_normed_without_overflow() -> None:
    x = torch.full((2, 40), 3e4, dtype=torch.float16)
    weight = torch.full((40,), 4.0, dtype=torch.float16)
    for norm in (rms_norm_torch, rms_norm_triton):
        _assert_near(norm(x, weight, EPS), weight.expand(2, -1), TOLERANCE[torch.float16])


def test_rms_norm_kernel_reads_strided_rows() -> None:
    storage = _normal(5, 96, dtype=torch.float32, seed=7)
    weight = _normal(40, dtype=torch.float32, seed=8)
    for x in (storage[:, 3:43], storage[:, :80:2]):
        _assert_near(rms_norm_triton(x, weight, EPS), rms_norm_torch(x, weight, EPS), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 33), (2, 1025)])
def test_silu_mul_kernel_and_twin_are_the_formula(
    dtype: torch.dtype, rows: int, columns: int
) -> None:
    gate_up = _normal(rows, 2 * columns, dtype=dtype, seed=9) * 3
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    for got in (silu_mul_torch(gate_up), silu_mul_triton(gate_up)):
        assert got.dtype == dtype
        _assert_near(got, expected, TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_silu_of_large_negative_gates_is_zero() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 2.0, 2.0]])
    for got in (silu_mul_torch(gate_up), silu_mul_triton(gate_up)):
        assert got.tolist() == [[0.0, 0.0]]


def test_no_rows_give_no_rows() -> None:
    assert rms_norm_triton(torch.empty(0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert silu_mul_triton(torch.empty(0, 8)).shape == (0, 4)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="weight"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)
    with pytest.raises(InvalidRequestError, match="2I"):
        silu_mul(torch.ones(2, 7))
