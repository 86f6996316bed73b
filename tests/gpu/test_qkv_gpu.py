"""The product of q, k and v with its rotation and KV write, on the device, against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.rotary import rotary_table_torch, rotary_write
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.fused import SKINNY_ROWS, HalfNormed, Normed, fused_linear
from outrider.engine.kernels.linear.qkv import rotary_qkv, rotary_qkv_triton
from outrider.engine.kernels.norm import rms_norm_torch
from outrider.errors import InvalidRequestError

pytestmark = pytest.mark.gpu

# Largest error over the largest value: as of the product alone (see test_linear_gpu).
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
EPS = 1e-5
SLOTS = 320
UNTOUCHED = 7.0
# name: query heads, key/value heads, head size, features
MODELS = {"8b": (32, 8, 128, 4096), "small": (9, 3, 64, 576)}


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    x: Tensor
    """[M, K]: as the kernel takes it."""
    wide: Tensor
    """float64 [M, K]: as the formula takes it."""
    squares: Tensor | None
    weight: Tensor
    bias: Tensor | None
    table: Tensor
    write_slots: Tensor

    @property
    def input(self) -> Normed:
        return self.x if self.squares is None else HalfNormed(self.x, self.squares, EPS)

    def cache(self) -> Tensor:
        shape = (2, self.kv_heads, SLOTS, self.dim)
        return torch.full(shape, UNTOUCHED, dtype=self.x.dtype, device=self.x.device)

    def run(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and caches by the path that is chosen, or by the kernel with a `config`."""
        cache = self.cache()
        return self.into(cache, **options), cache[0], cache[1]

    def into(self, cache: Tensor, **options: Any) -> Tensor:
        path: Any = rotary_qkv_triton if options else rotary_qkv
        options |= {} if options else {"interleaved": True}
        arguments = (self.input, self.weight, self.table, self.write_slots, *cache)
        query: Tensor = path(*arguments, num_heads=self.heads, bias=self.bias, **options)
        return query

    def formula(self) -> tuple[Tensor, Tensor, Tensor]:
        """What `run` should give, in float64."""
        product = self.wide @ self.weight.double().t()
        if self.bias is not None:
            product += self.bias.double()
        heads = product.view(product.shape[0], -1, self.dim)
        cos, sin = self.table.double()[:, None].unbind(2)
        # A pair of neighbours is a complex number.
        pairs = torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2).contiguous())
        turned = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(2)
        cache = self.cache().double()
        there = self.write_slots >= 0
        place = self.write_slots[there]
        last = self.heads + self.kv_heads
        cache[0][:, place] = turned[there, self.heads : last].transpose(0, 1)
        cache[1][:, place] = heads[there, last:].transpose(0, 1)
        return turned[:, : self.heads], cache[0], cache[1]


def _case(
    m: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    model: str = "8b",
    normed: bool = True,
    biased: bool = False,
) -> Case:
    heads, kv_heads, dim, k = MODELS[model]
    generator = torch.Generator(device).manual_seed(m)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x = normal(m, k).to(dtype)
    wide, squares = x.double(), None
    if normed:
        norm_weight = (1 + normal(k) / 8).to(dtype)
        x = x * torch.arange(1, m + 1, device=device).to(dtype)[:, None]
        wide = rms_norm_torch(x.double(), norm_weight.double(), EPS)
        squares = torch.stack([part.float().square().sum(1) for part in x.chunk(64, dim=1)])
        x = x * norm_weight
    columns = (heads + 2 * kv_heads) * dim
    positions = torch.randint(0, 8000, (m,), generator=generator, device=device)
    frequencies = 5e5 ** -(torch.arange(0, dim, 2, device=device) / dim)
    write_slots = torch.randperm(SLOTS, generator=generator, device=device)[:m]
    write_slots[m // 2 :: 7] = -1
    return Case(
        heads,
        kv_heads,
        dim,
        x,
        wide,
        squares,
        (normal(columns, k) / k**0.5).to(dtype),
        normal(columns).to(dtype) if biased else None,
        rotary_table_torch(positions.int(), frequencies),
        write_slots,
    )


def _check(got: tuple[Tensor, ...], case: Case) -> None:
    for one, expected in zip(got, case.formula(), strict=True):
        assert one.dtype == case.x.dtype and one.shape == expected.shape
        error = (one.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[case.x.dtype]
    kept = torch.ones(SLOTS, dtype=torch.bool, device=case.x.device)
    kept[case.write_slots[case.write_slots >= 0]] = False
    assert bool((torch.stack(got[1:])[:, :, kept] == UNTOUCHED).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 8, 17, 64])
@pytest.mark.parametrize("model", MODELS)
def test_with_a_norm_before_it(
    model: str, m: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = _case(m, dtype, device, model=model, biased=biased)
    _check(case.run(), case)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [1, 8, 64, 65, 128])
@pytest.mark.parametrize("model", MODELS)
def test_without_a_norm(model: str, m: int, dtype: torch.dtype, device: torch.device) -> None:
    case = _case(m, dtype, device, model=model, normed=False)
    _check(case.run(), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [8, 64])
def test_values_are_the_products_to_the_bit(
    m: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = _case(m, dtype, device)
    there = case.write_slots >= 0
    _, _, values = case.run()
    product = fused_linear(case.input, case.weight).view(m, -1, case.dim)
    plain = product[there, case.heads + case.kv_heads :].transpose(0, 1)
    assert torch.equal(values[:, case.write_slots[there]], plain)


@pytest.mark.parametrize("m", [65, 100, 128])
def test_many_rows_take_two_steps(m: int, device: torch.device) -> None:
    case = _case(m, torch.bfloat16, device, normed=False)
    with pytest.raises(InvalidRequestError, match="rows for a kernel"):
        case.run(config=LinearConfig(64, 64, 64, 1, 4, 4, True))
    got = case.run()
    cache = case.cache()
    qkv = fused_linear(case.x, case.weight).view(m, -1, case.dim)
    query = rotary_write(
        qkv, case.table, case.write_slots, *cache, num_heads=case.heads, interleaved=True
    )
    assert torch.equal(got[0], query) and torch.equal(torch.stack(got[1:]), cache)
    # The rows that one step takes alone are the same, but for a rounding.
    few = case._replace(
        x=case.x[:SKINNY_ROWS],
        table=case.table[:SKINNY_ROWS],
        write_slots=case.write_slots[:SKINNY_ROWS],
    )
    alone = few.run()[0]
    error = (alone.double() - got[0][:SKINNY_ROWS].double()).abs().max() / alone.abs().max()
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split_k", [1, 4])
@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_every_variant_of_the_kernel(
    block_n: int, split_k: int, swap: bool, device: torch.device
) -> None:
    case = _case(13, torch.bfloat16, device, biased=True)
    if swap and block_n < 64:
        pytest.skip("wgmma takes 64 weight rows")
    config = LinearConfig(16, block_n, 64, split_k, 4, 3, swap)
    # Back to back, so that each product meets the counters as the one before it left them.
    results = [case.run(config=config) for _ in range(5)]
    for got in results:
        _check(got, case)
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


@pytest.mark.parametrize("split_k", [None, 2])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_in_a_graph(m: int, split_k: int | None, device: torch.device) -> None:
    """Every replay reads the slots and rows as they are then."""
    case = _case(m, torch.bfloat16, device)
    options: dict[str, Any] = {}
    if split_k is not None:
        options["config"] = LinearConfig({1: 16, 8: 16, 64: 64}[m], 64, 64, split_k, 4, 4, True)
    cache = case.cache()
    case.into(cache, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = case.into(cache, **options)
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(5):
        slots = torch.randperm(SLOTS, generator=generator, device=device)[:m]
        slots[m // 3 :: 4] = -1
        case.write_slots.copy_(slots)
        case.table.copy_(case.table.roll(1, 0))
        cache.fill_(UNTOUCHED)
        graph.replay()
        torch.cuda.synchronize()
        _check((query, *cache), case)
