"""Packed linear layers compute what plain ones do, alike for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outrider.engine.linear import MIN_ROWS, PackedLinear, PlainLinear, can_pack, make_linear

CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, CPU), reason="this torch build cannot pack weights"
)


def weight(rows: int = 96, width: int = 64) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(3)) / 8


def inputs(rows: int, width: int = 64) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 17, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_result_is_that_of_a_linear_layer(packed: bool, rows: int, has_bias: bool) -> None:
    bias = torch.arange(96.0) if has_bias else None
    layer = make_linear(weight(), bias, packed=packed)
    with torch.inference_mode():
        x, residual = inputs(rows), torch.full((rows, 96), 2.0)
        expected = F.linear(x, weight(), bias)
        torch.testing.assert_close(layer(x), expected)
        torch.testing.assert_close(layer.add(x, residual), expected + 2.0)
        assert bool((residual == 2.0).all()), "the residual must not change"


def test_other_leading_dimensions_are_kept() -> None:
    layer = make_linear(weight())
    x = inputs(6).view(2, 3, 64)
    assert layer(x).shape == (2, 3, 96)
    torch.testing.assert_close(layer(x), F.linear(x, weight()))
    assert layer(x[0, 0]).shape == (96,)


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_row_does_not_depend_on_how_many_rows_there_are(dtype: torch.dtype) -> None:
    if not can_pack(dtype, CPU):
        return
    layer = PackedLinear(weight(576, 1536).to(dtype))
    x = inputs(33, 1536).to(dtype)
    with torch.inference_mode():
        everything = layer(x)
        for rows in (1, 2, MIN_ROWS, 5, 8, 17):
            assert torch.equal(layer(x[:rows]), everything[:rows]), f"{rows} rows"


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536)])
def test_batch_invariant_layers_keep_the_bits_of_every_row(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    if not can_pack(dtype, CPU):
        return
    layer = make_linear(weight(*shape).to(dtype), batch_invariant=True)
    x, residual = inputs(200, shape[1]).to(dtype), inputs(200, shape[0]).to(dtype)
    with torch.inference_mode():
        results = layer(x), layer.add(x, residual)
        for rows in (1, 2, 15, 16, 17, 32, 33, 40, 64, 96, 130):
            assert torch.equal(layer(x[:rows]), results[0][:rows]), f"{rows} rows"
            assert torch.equal(layer.add(x[:rows], residual[:rows]), results[1][:rows])
            single = layer(x[rows : rows + 1])
            assert torch.equal(single, results[0][rows : rows + 1]), f"row {rows} alone"


@needs_packing
def test_the_packed_layer_is_chosen_and_does_not_share_the_weight() -> None:
    plain = weight()
    layer = make_linear(plain)
    assert isinstance(layer, PackedLinear)
    before = layer(inputs(5))
    plain.zero_()
    assert torch.equal(layer(inputs(5)), before)


def test_types_and_devices_that_cannot_be_packed_stay_plain() -> None:
    assert isinstance(make_linear(weight().double()), PlainLinear)
    assert isinstance(make_linear(weight(), packed=False), PlainLinear)
    assert not can_pack(torch.float32, torch.device("meta"))
