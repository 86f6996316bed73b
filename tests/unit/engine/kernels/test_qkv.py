"""The product of q, k and v with its rotation and KV write: PyTorch reference and kernel against
float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_table, rotary_write
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import HalfNormed, fused_linear, fused_linear_triton
from outrider.engine.kernels.linear.launch import RotaryOut
from outrider.engine.kernels.linear.qkv import rotary_qkv, rotary_qkv_torch, rotary_qkv_triton
from outrider.engine.kernels.norm import rms_norm_torch
from outrider.errors import InternalError, InvalidRequestError
from tests.grids import thorough

HEADS, KV_HEADS, SLOTS = 3, 2, 80
EPS = 1e-3
UNTOUCHED = 7.0
# Relative to the largest value. The interpreter cuts bfloat16 off where torch rounds.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Case(NamedTuple):
    x: Tensor
    weight: Tensor
    table: Tensor
    write_slots: Tensor
    bias: Tensor | None

    def run(self, path: Any, *, x: Any = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [M, Q, d] and the caches [G, S, d] that one of the paths leaves."""
        cache = self.cache()
        x = self.x if x is None else x
        arguments = (x, self.weight, self.table, self.write_slots, *cache)
        query = path(*arguments, num_heads=HEADS, bias=self.bias, **options)
        return query, cache[0], cache[1]

    def cache(self) -> Tensor:
        dim = 2 * self.table.shape[2]
        return torch.full((2, KV_HEADS, SLOTS, dim), UNTOUCHED, dtype=self.x.dtype)


def _case(
    rows: int, dim: int, dtype: torch.dtype = torch.float32, *, k: int = 40, biased: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    positions = torch.randint(0, 4000, (rows,), generator=generator, dtype=torch.int32)
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, dim, 2) / dim)
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    slots[rows // 2 :: 5] = -1
    columns = (HEADS + 2 * KV_HEADS) * dim
    return Case(
        normal(rows, k).to(dtype),
        (normal(columns, k) / k**0.5).to(dtype),
        rotary_table(positions, frequencies),
        slots,
        normal(columns).to(dtype) if biased else None,
    )


def _formula(case: Case, x: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What `LogitsCase.run` should give, in float64; x: the normed rows, if other than the
    case's."""
    wide = (case.x if x is None else x).double()
    product = torch.einsum("mk,nk->mn", wide, case.weight.double())
    if case.bias is not None:
        product = product + case.bias.double()
    heads = product.view(wide.shape[0], HEADS + 2 * KV_HEADS, -1)
    cos, sin = case.table.double()[:, None].unbind(2)
    # A pair of neighbours is a complex number.
    turned = torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2)) * torch.complex(cos, sin)
    turned = torch.view_as_real(turned).flatten(2)
    cache = case.cache().double()
    for row, slot in enumerate(case.write_slots.tolist()):
        if slot >= 0:
            cache[0, :, slot] = turned[row, HEADS : HEADS + KV_HEADS]
            cache[1, :, slot] = heads[row, HEADS + KV_HEADS :]
    return turned[:, :HEADS], cache[0], cache[1]


def _check(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).abs().max() < tolerance * other.abs().max()


def _check_untouched(case: Case, caches: tuple[Tensor, ...]) -> None:
    kept = torch.ones(SLOTS, dtype=torch.bool)
    kept[case.write_slots[case.write_slots >= 0]] = False
    for cache in caches:
        assert bool((cache[:, kept] == UNTOUCHED).all())
        assert not bool((cache[:, ~kept] == UNTOUCHED).any())


def _config(rows: int, block_n: int, split_k: int = 1, *, swap: bool = False) -> LinearConfig:
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return LinearConfig(block_m, block_n, 16, split_k, 4, 2, swap)


def _half_normed(x: Tensor, norm_weight: Tensor) -> HalfNormed:
    squares = torch.stack([part.float().square().sum(1) for part in x.tensor_split(3, dim=1)])
    return HalfNormed((x * norm_weight).to(x.dtype), squares, EPS)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_on_a_cpu_it_is_the_formula(rows: int, biased: bool, dtype: torch.dtype) -> None:
    case = _case(rows, 20, dtype, biased=biased)
    got = case.run(rotary_qkv, interleaved=True)
    assert got[0].dtype == dtype
    # The rotation is float32 even then.
    _check(got, _formula(case), TOLERANCE.get(dtype, 3e-6))
    _check_untouched(case, got[1:])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("split_k", [1, 3])
# One row, a full tile and one that is not full: three rows and four full tiles add no branch.
@pytest.mark.parametrize("rows", [1, thorough(3), 16, 33, thorough(64)])
def test_kernel_is_the_formula(rows: int, split_k: int, normed: bool) -> None:
    case = _case(rows, 32, k=72, biased=True)
    x: Any = case.x
    if normed:
        # Rows of different sizes, so that a row's quotient cannot be taken for another's.
        x = x * torch.arange(1, rows + 1)[:, None]
        weight = torch.linspace(0.5, 2.0, x.shape[1])
        expected = _formula(case, rms_norm_torch(x.double(), weight.double(), EPS))
        x = _half_normed(x, weight)
    else:
        expected = _formula(case)
    config = _config(rows, 16, split_k)
    # Twice, so that a split product meets the counters as the one before it left them.
    for _ in range(2 if split_k > 1 else 1):
        got = case.run(rotary_qkv_triton, x=x, config=config)
        _check(got, expected, TOLERANCE[torch.float32])
        _check_untouched(case, got[1:])


HALVES = [torch.float16, torch.bfloat16]
# A head in one tile, in two, in three and in four; wider heads cut likewise are as these.
TILES = [(32, 16), (64, 64), (96, 32), (128, 32)]
TYPED_TILES = [
    *((*tile, torch.float32) for tile in TILES),
    *(thorough(*tile, torch.float32) for tile in ((32, 32), (64, 32), (128, 128))),
    *((*tile, dtype) for tile in ((32, 16), (64, 64)) for dtype in HALVES),
]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("dim", "block_n", "dtype"), TYPED_TILES)
def test_tiles_of_heads(dim: int, block_n: int, swap: bool, dtype: torch.dtype) -> None:
    case = _case(5, dim, dtype)
    config = _config(5, block_n, swap=swap)
    got = case.run(rotary_qkv_triton, config=config)
    _check(got, _formula(case), TOLERANCE[dtype])
    _check(got, case.run(rotary_qkv_torch), TOLERANCE[dtype])
    _check_untouched(case, got[1:])
    # Values are the product's, to the bit.
    product = fused_linear_triton(case.x, case.weight, config=config).view(5, -1, dim)
    there = case.write_slots >= 0
    source = product[there, HEADS + KV_HEADS :].transpose(0, 1)
    assert torch.equal(got[2][:, case.write_slots[there]], source)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_values_that_are_not_finite_stay_apart() -> None:
    """An infinity of a value must not make a NaN of its neighbour."""
    case = _case(2, 32)
    case.weight[-3] = torch.inf
    case.x[:] = 1.0
    case.write_slots[:] = torch.tensor([4, 9])
    values = case.run(rotary_qkv_triton, config=_config(2, 16))[2]
    assert bool(values[-1, [4, 9], -3].isinf().all())
    assert not bool(values.isnan().any())


def test_a_half_norm_takes_the_kernel_only_where_its_tile_fits() -> None:
    """The tile for these heads would be wider than one of them."""
    case = _case(3, 8)
    norm_weight = torch.linspace(0.5, 2.0, case.x.shape[1])
    normed = rms_norm_torch(case.x.double(), norm_weight.double(), EPS)
    x = _half_normed(case.x, norm_weight)
    got = case.run(rotary_qkv, x=x, interleaved=True)
    _check(got, _formula(case, normed), TOLERANCE[torch.float32])
    wide = _case(3, 64)
    x = _half_normed(wide.x, norm_weight)
    got = wide.run(rotary_qkv, x=x, interleaved=True)
    _check(got, _formula(wide, normed), TOLERANCE[torch.float32])


@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_and_halves_take_two_steps(interleaved: bool) -> None:
    case = _case(6, 16, torch.bfloat16)
    options: dict[str, Any] = {"interleaved": interleaved}
    if interleaved:
        norms = torch.linspace(0.5, 2.0, (HEADS + KV_HEADS) * 16).view(-1, 16).bfloat16()
        options |= {"qk_norms": norms, "eps": EPS}
    expected = case.cache()
    qkv = fused_linear(case.x, case.weight).view(6, -1, 16)
    query = rotary_write(qkv, case.table, case.write_slots, *expected, num_heads=HEADS, **options)
    got = case.run(rotary_qkv, **options)
    for one, other in zip(got, (query, *expected), strict=True):
        assert torch.equal(one, other)


def test_no_rows_leave_the_cache() -> None:
    query, keys, values = _case(0, 32).run(rotary_qkv_triton, config=_config(1, 16))
    assert query.shape == (0, HEADS, 32)
    assert bool((keys == UNTOUCHED).all()) and bool((values == UNTOUCHED).all())


def test_a_tile_wider_than_a_head_is_refused() -> None:
    for dim, block_n in ((32, 64), (80, 32)):
        with pytest.raises(InvalidRequestError, match=f"heads of {dim} in tiles of {block_n}"):
            _case(2, dim).run(rotary_qkv_triton, config=_config(2, block_n))


def test_a_rotated_product_takes_nothing_after_it() -> None:
    case = _case(2, 8)
    rotary = RotaryOut(case.table, case.write_slots, *case.cache(), HEADS)
    with pytest.raises(InternalError, match="no residual"):
        fused_linear_triton(
            case.x, case.weight, residual=torch.zeros(2, len(case.weight)), rotary=rotary
        )
    with pytest.raises(InternalError, match="gate"):
        fused_linear_triton(case.x, case.weight, gated=True, rotary=rotary)


def _bad_inputs() -> list[tuple[str, dict[str, Any]]]:
    cache = torch.zeros(2, KV_HEADS, SLOTS, 8)
    return [
        (r"x \[M, K\]", {"x": torch.ones(3, 39)}),
        ("agree", {"x": torch.ones(3, 40).half()}),
        ("bias", {"bias": torch.ones(3)}),
        ("weight rows", {"num_heads": HEADS + 1}),
        ("weight rows", {"keys": cache[0, :1], "values": cache[1, :1]}),
        (r"\[G, S, d\]", {"values": cache[0, :, 1:]}),
        (r"\[G, S, d\]", {"keys": cache[0, 0], "values": cache[0, 0]}),
        ("even", {"keys": cache[0, ..., 1:], "values": cache[0, ..., 1:]}),
        ("table", {"table": torch.ones(3, 2, 8)}),
        ("table", {"table": torch.ones(2, 2, 4)}),
        ("table", {"table": torch.ones(3, 2, 4, dtype=torch.bfloat16)}),
        ("table", {"table": torch.ones(3, 4, 2).transpose(1, 2)}),
        ("write_slots", {"write_slots": torch.zeros(2, dtype=torch.int64)}),
        ("write_slots", {"write_slots": torch.zeros(3, dtype=torch.int32)}),
        ("write_slots", {"write_slots": torch.zeros(6, dtype=torch.int64)[::2]}),
        ("contiguous", {"keys": cache[0].transpose(1, 2).contiguous().transpose(1, 2)}),
    ]


@pytest.mark.parametrize(("message", "wrong"), _bad_inputs())
def test_bad_input_is_refused(message: str, wrong: dict[str, Any]) -> None:
    case = _case(3, 8)
    keys, values = case.cache()
    good = {
        "x": case.x,
        "weight_NK": case.weight,
        "table": case.table,
        "write_slots": case.write_slots,
        "keys": keys,
        "values": values,
        "num_heads": HEADS,
        "interleaved": True,
    }
    rotary_qkv(**good)
    with pytest.raises(InvalidRequestError, match=message):
        rotary_qkv(**good | wrong)
