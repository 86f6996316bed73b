"""Fused products on a GPU at the shapes of an 8B model, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import add_linear, fused_linear, fused_linear_triton
from outrider.engine.kernels.norm import rms_norm, rms_norm_torch, silu_mul, silu_mul_torch

pytestmark = pytest.mark.gpu

# Largest error over the largest value: operands and result of 8 (bfloat16) and 11 (float16) bits,
# and sums of up to 14336 float32 products.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
EPS = 1e-5
# name: N, K, norm, residual, gated, result in float32
SHAPES = {
    "qkv": (6144, 4096, True, False, False, False),
    "o_proj": (4096, 4096, False, True, False, False),
    "gate_up": (28672, 4096, True, False, True, False),
    "down": (4096, 14336, False, True, False, False),
    "lm_head": (128256, 4096, True, False, False, True),
    "head_fc": (4096, 12288, False, False, False, False),
    "head_qkv": (6144, 8192, False, False, False, False),
    "head_lm": (32000, 4096, True, False, False, True),
    "smol_qkv": (960, 576, True, False, False, False),
    "smol_gate_up": (3072, 576, True, False, True, False),
    "smol_down": (576, 1536, False, True, False, False),
    "odd": (1026, 1003, True, True, True, False),
}


def _case(
    name: str, m: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    n, k, normed, residual, gated, float_out = SHAPES[name]
    generator = torch.Generator(device).manual_seed(m)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    options: dict[str, Any] = {"gated": gated}
    x = normal(m, k)
    if normed:
        x *= torch.arange(1, m + 1, device=device)[:, None]
        options |= {"norm_weight": (1 + normal(k) / 8).to(dtype), "eps": EPS}
    if residual:
        options["residual"] = normal(m, n // 2 if gated else n).to(dtype)
    if float_out:
        options["out_dtype"] = torch.float32
    return x.to(dtype), (normal(n, k) / k**0.5).to(dtype), options


def _reference(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    wide = x.double()
    if norm_weight is not None:
        mean_square = wide.square().mean(dim=1, keepdim=True)
        wide = wide * torch.rsqrt(mean_square + eps) * norm_weight.double()
    # In slices: the vocabulary's weight in float64 takes 4 GB.
    result = torch.cat([wide @ part.double().t() for part in torch.split(weight, 16384)], dim=1)
    if gated:
        gate, up = result.chunk(2, dim=1)
        result = F.silu(gate) * up
    return result if residual is None else result + residual.double()


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [1, 8, 17, 64, 65, 200])
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_right(name: str, m: int, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, options = _case(name, m, dtype, device)
    got = fused_linear(x, weight, **options)
    assert got.dtype == options.get("out_dtype", dtype)
    assert _error(got, _reference(x, weight, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split_k", [1, 4])
def test_every_variant_of_the_kernel(split_k: int, swap: bool, device: torch.device) -> None:
    for name in ("qkv", "o_proj", "gate_up", "odd"):
        x, weight, options = _case(name, 13, torch.bfloat16, device)
        config = LinearConfig(16, 64, 64, split_k, 4, 3, swap)
        expected = _reference(x, weight, **options)
        if "norm_weight" in options:
            x = rms_norm(x, options.pop("norm_weight"), options.pop("eps"))
        # Back to back, so that each product meets the counters as the one before it left them.
        results = [fused_linear_triton(x, weight, config=config, **options) for _ in range(5)]
        for got in results:
            assert _error(got, expected) < TOLERANCE[torch.bfloat16]
            assert torch.equal(got, results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 8, 33, 64, 65])
def test_a_norm_split_around_products(m: int, dtype: torch.dtype, device: torch.device) -> None:
    _, o_proj, _ = _case("o_proj", m, dtype, device)
    _, up, options = _case("gate_up", m, dtype, device)
    x = torch.randn(m, o_proj.shape[1], device=device, dtype=dtype)
    residual = torch.randn(m, o_proj.shape[0], device=device, dtype=dtype)
    weight, eps = options.pop("norm_weight"), options.pop("eps")
    expected = _reference(x, o_proj, gated=False, residual=residual)
    total, normed = add_linear(x, o_proj, residual.clone(), norm_weight=weight, eps=eps)
    assert _error(total, expected) < TOLERANCE[dtype]
    got = fused_linear(normed, up, **options)
    wanted = _reference(expected, up, norm_weight=weight, eps=eps, **options)
    assert _error(got, wanted) < 2 * TOLERANCE[dtype]


def test_a_chain_of_dependent_products_in_a_graph(device: torch.device) -> None:
    """Each product waits for the one before it, replay after replay."""
    _, o_proj, _ = _case("o_proj", 4, torch.bfloat16, device)
    _, up, up_options = _case("gate_up", 4, torch.bfloat16, device)
    _, down, _ = _case("down", 4, torch.bfloat16, device)
    x = torch.randn(4, 4096, device=device, dtype=torch.bfloat16)

    def run(rows: Tensor) -> Tensor:
        for _ in range(8):
            rows = fused_linear(rows, o_proj, residual=rows)
            hidden = fused_linear(rows, up, **up_options)
            rows = fused_linear(hidden, down, residual=rows)
        return rows

    expected = x.double()
    for _ in range(8):
        expected = _reference(expected, o_proj, gated=False, residual=expected)
        hidden = _reference(expected, up, **up_options)
        expected = _reference(hidden, down, gated=False, residual=expected)
    eager = run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, eager)
    assert _error(eager, expected) < 3e-2


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 65, 1000])
def test_norm_and_activation(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    x, _, _ = _case("down", rows, dtype, device)
    weight = torch.linspace(0.5, 2, x.shape[1], device=device).to(dtype)
    expected = rms_norm_torch(x.double(), weight.double(), EPS)
    assert _error(rms_norm(x, weight, EPS), expected) < TOLERANCE[dtype]
    assert _error(silu_mul(x), silu_mul_torch(x.double())) < TOLERANCE[dtype]
