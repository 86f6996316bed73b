"""Fused products: the PyTorch reference against a float64 formula, both GPU paths against the
PyTorch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.linear.configs import (
    MAX_TILES,
    TABLE,
    WORKSPACE_FLOATS,
    LinearConfig,
    choose_config,
)
from outrider.engine.kernels.linear.fused import (
    SKINNY_ROWS,
    fused_linear,
    fused_linear_torch,
    fused_linear_triton,
    fused_linear_wide,
)
from outrider.engine.kernels.runtime import cdiv
from outrider.errors import InternalError, InvalidRequestError
from tests.grids import thorough

CPU = torch.device("cpu")
# Relative to the largest value: roundings of the operands, of the result and, in the wide path, of
# the values between its steps.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)
FUSIONS = ("", "residual", "bias", "gated", "bias residual gated")


def _case(
    m: int, n: int, k: int, dtype: torch.dtype, fusions: str = "", seed: int = 0
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """x, weight and the keyword arguments of a product with the fusions named."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    gated = "gated" in fusions
    options: dict[str, Any] = {"gated": gated}
    x, weight = normal(m, k), (normal(n, k) / k**0.5).to(dtype)
    if "norm" in fusions:
        options |= {"norm_weight": 1 + normal(k) / 4, "eps": 1e-3}
        # Rows of different sizes, so that a row's scale cannot be taken for another's.
        x = x * torch.arange(1, m + 1).to(dtype)[:, None] / 8
    if "bias" in fusions:
        options["bias"] = normal(n)
    if "residual" in fusions:
        options["residual"] = normal(m, n // 2 if gated else n)
    return x, weight, options


def _formula(
    x: Tensor,
    weight: Tensor,
    *,
    gated: bool,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The result in float64."""
    wide = x.double()
    if norm_weight is not None:
        mean_square = (wide * wide).sum(dim=1, keepdim=True) / x.shape[1]
        wide = wide / (mean_square + eps).sqrt() * norm_weight.double()
    result = torch.einsum("mk,nk->mn", wide, weight.double())
    if bias is not None:
        result = result + bias.double()
    if gated:
        half = weight.shape[0] // 2
        gate, up = result[:, :half], result[:, half:]
        result = gate / (1 + torch.exp(-gate)) * up
    return result if residual is None else result + residual.double()


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusions", [*FUSIONS, "norm", "norm bias residual gated"])
def test_product_on_the_cpu_is_the_formula(dtype: torch.dtype, fusions: str) -> None:
    x, weight, options = _case(5, 22, 37, dtype, fusions)
    got = fused_linear(x, weight, **options)
    assert got.dtype == dtype
    assert _error(got, _formula(x, weight, **options)) < TOLERANCE[dtype]


def test_float64_is_kept() -> None:
    x, weight, options = _case(5, 22, 37, torch.float64, "norm bias residual gated")
    assert _error(fused_linear(x, weight, **options), _formula(x, weight, **options)) < 1e-13


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split_k", [1, thorough(2), 4])
@pytest.mark.parametrize("fusions", FUSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_agrees_with_the_formula(
    dtype: torch.dtype, fusions: str, split_k: int, swap: bool
) -> None:
    x, weight, options = _case(3, 70, 72, dtype, fusions)
    config = LinearConfig(16, 16, 16, split_k, 4, 2, swap)
    got = fused_linear_triton(x, weight, config=config, **options)
    assert got.dtype == dtype
    assert _error(got, _formula(x, weight, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 2, 1), (1, 48, 64), (16, 30, 33), (17, 64, 16), (33, 18, 130), (64, 2, 8)]
)
@pytest.mark.parametrize("fusions", ["residual", "gated"])
def test_kernel_at_edge_shapes_with_its_own_config(m: int, n: int, k: int, fusions: str) -> None:
    x, weight, options = _case(m, n, k, torch.float32, fusions)
    got = fused_linear_triton(x, weight, **options)
    assert _error(got, _formula(x, weight, **options)) < TOLERANCE[torch.float32]


def test_more_parts_than_blocks_of_k() -> None:
    x, weight, options = _case(2, 16, 24, torch.float32, "residual")
    config = LinearConfig(16, 16, 16, 4, 4, 2, False)
    got = fused_linear_triton(x, weight, config=config, **options)
    assert _error(got, _formula(x, weight, **options)) < TOLERANCE[torch.float32]


def test_split_products_repeat_after_one_another() -> None:
    """The counters and the workspace are ready for the next product, whatever its shape."""
    config = LinearConfig(16, 16, 16, 4, 4, 2, True)
    for seed, (m, n) in enumerate([(3, 70), (16, 200), (1, 16), (3, 70)]):
        x, weight, options = _case(m, n, 72, torch.float32, "bias", seed)
        got = fused_linear_triton(x, weight, config=config, **options)
        assert _error(got, _formula(x, weight, **options)) < TOLERANCE[torch.float32]
        again = fused_linear_triton(x, weight, config=config, **options)
        assert torch.equal(got, again)


def test_rows_do_not_depend_on_their_company() -> None:
    x, weight, options = _case(7, 40, 72, torch.float32, "bias")
    config = LinearConfig(16, 16, 16, 2, 4, 2, True)
    together = fused_linear_triton(x, weight, config=config, **options)
    alone = fused_linear_triton(x[4:5], weight, config=config, **options)
    assert torch.equal(alone, together[4:5])


def test_kernel_reads_strided_rows() -> None:
    storage, weight, _ = _case(6, 40, 96, torch.float32)
    residual = _case(6, 80, 96, torch.float32, "residual")[2]["residual"]
    config = LinearConfig(16, 16, 16, 2, 4, 2, False)
    for x, rows, added in (
        (storage[:, 8:56], weight[:, 8:56], residual[:, :40]),
        (storage[:, ::2], weight[:, 48:], residual[:, ::2]),
    ):
        got = fused_linear_triton(x, rows, residual=added, config=config)
        expected = _formula(x, rows, gated=False, residual=added)
        assert _error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", [fused_linear_torch, fused_linear_triton, fused_linear_wide])
def test_result_in_another_dtype_is_not_rounded_to_the_operands(path: Any) -> None:
    x, weight, options = _case(3, 24, 40, torch.float16)
    got = path(x, weight, out_dtype=torch.float32, **options)
    assert got.dtype == torch.float32
    # The wide path rounds in between on a CPU, where torch has no product with a wider result.
    limit = 1e-3 if path is fused_linear_wide else 1e-6
    assert _error(got, _formula(x, weight, **options)) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusions", [*FUSIONS, "bias residual"])
def test_wide_path_agrees_with_the_formula(dtype: torch.dtype, fusions: str) -> None:
    x, weight, options = _case(70, 22, 40, dtype, fusions)
    before = {name: value.clone() for name, value in options.items() if name == "residual"}
    got = fused_linear_wide(x, weight, **options)
    assert got.dtype == dtype
    assert _error(got, _formula(x, weight, **options)) < TOLERANCE[dtype]
    for name, value in before.items():
        assert torch.equal(options[name], value)


@pytest.mark.parametrize("fusions", ["residual", "bias residual"])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_wide_path_may_take_the_residuals_memory(fusions: str, out_dtype: torch.dtype) -> None:
    x, weight, options = _case(70, 22, 40, torch.float16, fusions)
    expected = _formula(x, weight, **options)
    got = fused_linear_wide(x, weight, out_dtype=out_dtype, overwrite=True, **options)
    assert got.dtype == out_dtype
    assert _error(got, expected) < TOLERANCE[torch.float16]
    taken = got.data_ptr() == options["residual"].data_ptr()
    assert taken == (fusions == "residual" and out_dtype == torch.float16)


def test_no_rows_give_no_rows() -> None:
    x, weight, options = _case(0, 24, 40, torch.float32, "gated")
    for path in (fused_linear, fused_linear_triton):
        assert path(x, weight, **options).shape == (0, 12)


def _bad_inputs() -> list[tuple[str, dict[str, Any]]]:
    x, weight = torch.ones(2, 8), torch.ones(6, 8)
    return [
        (r"x \[M, K\]", {"x_MK": torch.ones(2, 7), "weight_NK": weight}),
        ("agree", {"x_MK": x.half(), "weight_NK": weight}),
        ("contiguous", {"x_MK": x, "weight_NK": torch.ones(8, 6).t()}),
        ("even", {"x_MK": x, "weight_NK": torch.ones(5, 8), "gated": True}),
        ("bias", {"x_MK": x, "weight_NK": weight, "bias": torch.ones(3)}),
        ("rms_norm", {"x_MK": x, "weight_NK": weight, "norm_weight": torch.ones(6)}),
        ("residual", {"x_MK": x, "weight_NK": weight, "residual": torch.ones(2, 3)}),
    ]


@pytest.mark.parametrize(("message", "arguments"), _bad_inputs())
def test_bad_input_is_refused(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        fused_linear(**arguments)


def test_too_many_rows_for_the_kernel_are_refused() -> None:
    x, weight, _ = _case(SKINNY_ROWS + 1, 4, 8, torch.float32)
    with pytest.raises(InvalidRequestError, match="65 rows"):
        fused_linear_triton(x, weight)


def test_a_split_beyond_the_workspace_is_refused() -> None:
    x, weight, _ = _case(1, 16 * (MAX_TILES + 1), 4, torch.float32)
    with pytest.raises(InternalError, match="workspace"):
        fused_linear_triton(x, weight, config=LinearConfig(16, 16, 16, 2, 4, 2, False))


def _assert_launchable(config: LinearConfig, n: int, gated: bool, element_size: int) -> None:
    rows = config.tile_rows(gated)
    for size in (config.block_m, rows, config.block_k):
        assert size >= 16 and size & (size - 1) == 0
    stage = (rows + config.block_m) * config.block_k * element_size
    assert stage * config.num_stages <= 227 << 10
    if config.split_k > 1:
        tiles = cdiv(n // 2 if gated else n, config.block_n)
        assert tiles <= MAX_TILES
        assert config.workspace_floats(tiles, gated) <= WORKSPACE_FLOATS


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_chosen_configs_fit_the_device(m: int, element_size: int) -> None:
    shapes = {(n, k, gated) for n, k, gated, _ in TABLE}
    shapes |= {(960, 576, False), (3072, 576, True), (49152, 576, False), (16, 1 << 20, False)}
    for n, k, gated in shapes:
        config = choose_config(m, n, k, gated, CPU, element_size)
        assert config.block_m >= m
        _assert_launchable(config, n, gated, element_size)


def test_untuned_shapes_fill_the_device() -> None:
    """At least two programs for each of 132 SMs where rows and features allow it."""
    for n, k in [(2048, 8192), (5120, 5120), (8192, 3072)]:
        config = choose_config(8, n, k, False, CPU)
        assert cdiv(n, config.block_n) * config.split_k >= 2 * 132 * 0.9


def test_tuned_shapes_come_from_the_table() -> None:
    for (n, k, gated, block_m), entry in TABLE.items():
        assert choose_config(block_m, n, k, gated, CPU) == LinearConfig(block_m, *entry)
