"""Batch invariance on a GPU: rows keep their bits at the shapes of an 8B model, in every order of
work, and texts in bfloat16 do not depend on drafts or on other sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.invariant import InvariantConfig, invariant_attention
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.engine.kernels.attention.rotary import rotary_table
from outrider.engine.kernels.linear.configs import LinearConfig
from outrider.engine.kernels.linear.invariant import (
    forbid_split_k,
    invariant_linear,
    invariant_linear_triton,
    invariant_qkv,
)
from outrider.engine.kernels.matrix_unit import multiply_16_bit
from outrider.spec.plan import SpeculationPlan
from tests.unit.engine.kernels.trees import random_parents, scattered
from tests.unit.verifier.device_serving import (
    OWN,
    PROMPTS,
    SAMPLINGS,
    run_all,
    run_drafted,
    serving,
)
from tests.unit.verifier.harness import CHAIN, TREE

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
ROWS = (1, 2, 15, 16, 17, 33, 64, 65, 130, 320, 512, 2048)
# name: N, K, gated, residual, result in float32
PRODUCTS = {
    "qkv": (6144, 4096, False, False, False),
    "o_proj": (4096, 4096, False, True, False),
    "gate_up": (28672, 4096, True, False, False),
    "down": (4096, 14336, False, True, False),
    "lm_head": (32000, 4096, False, False, True),
    "small_down": (576, 1536, False, True, False),
}
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
BFLOAT16: dict[str, Any] = {"device": "cuda:0", "weights": torch.bfloat16, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def no_split_k() -> Iterator[None]:
    cuda = torch.backends.cuda
    library, matmul = cuda.preferred_blas_library(), cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    forbid_split_k()
    yield
    matmul.allow_bf16_reduced_precision_reduction = before
    matmul.allow_fp16_reduced_precision_reduction = before
    cuda.preferred_blas_library(library)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CUDA).bfloat16()


def test_the_model_of_the_matrix_unit_has_its_bits() -> None:
    x, weight = normal(48, 576, seed=1), normal(64, 576, seed=2)
    got = invariant_linear_triton(x, weight, out_dtype=torch.float32)
    wide_x, wide_weight = (t.float().cpu().numpy() for t in (x, weight))
    expected = multiply_16_bit(wide_x, wide_weight.T, np.zeros((48, 64), np.float32))
    assert np.array_equal(got.cpu().numpy(), expected)


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_products_keep_their_bits(name: str) -> None:
    n, k, gated, adds, is_float = PRODUCTS[name]
    weight, x = normal(n, k, seed=3) / 64, normal(max(ROWS), k, seed=4)
    columns = n // 2 if gated else n
    residual = normal(max(ROWS), columns, seed=5) if adds else None
    dtype = torch.float32 if is_float else None

    def run(rows: slice) -> Tensor:
        return invariant_linear(
            x[rows],
            weight,
            gated=gated,
            residual=None if residual is None else residual[rows],
            out_dtype=dtype,
        )

    alone = torch.cat([run(slice(row, row + 1)) for row in range(64)])
    for count in ROWS:
        got = run(slice(0, count))
        assert torch.equal(got[:64], alone[:count]), count


@pytest.mark.parametrize("num_rows", [16, 60, 300])
def test_tiles_of_products_change_no_bit(num_rows: int) -> None:
    weight, x = normal(4096, 4096, seed=6) / 64, normal(num_rows, 4096, seed=7)
    expected = invariant_linear_triton(x, weight)
    for block_m, block_n, block_k, swap in (
        (16, 64, 128, True),
        (32, 32, 64, False),
        (64, 128, 64, True),
        (64, 64, 256, False),
    ):
        config = LinearConfig(block_m, block_n, block_k, 1, 4, 2, swap)
        assert torch.equal(invariant_linear_triton(x, weight, config=config), expected), config


def test_heads_of_few_and_of_many_rows_have_the_same_bits() -> None:
    weight, x = normal((HEADS + 2 * KV_HEADS) * DIM, 4096, seed=8) / 64, normal(320, 4096, seed=9)
    positions = torch.arange(320, dtype=torch.int32, device=CUDA) * 7
    table = rotary_table(positions, 1e4 ** -torch.linspace(0, 1, DIM // 2, device=CUDA))
    slots = torch.arange(320, device=CUDA)

    def run(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.zeros(2, KV_HEADS, 320, DIM, device=CUDA).bfloat16()
        query = invariant_qkv(
            x[rows], weight, table[rows], slots[rows], keys, values, num_heads=HEADS
        )
        return query, keys[:, rows], values[:, rows]

    many = run(slice(0, 320))
    few = run(slice(100, 105))
    assert torch.equal(many[0][100:105], few[0])
    assert torch.equal(many[1][:, 100:105], few[1])
    assert torch.equal(many[2][:, 100:105], few[2])


class Texts:
    """Some sequences over a cache, whose rows can be computed in any way."""

    def __init__(self, batch: int, length: int) -> None:
        self.paging = scattered(np.random.default_rng(0), batch, length // BLOCK, BLOCK)
        self.length = length
        self.q = 2 * normal(batch, length, HEADS, DIM, seed=10)
        kv = normal(2, batch, KV_HEADS, length, DIM, seed=11)
        self.kv = kv
        self.cache = normal(2, KV_HEADS, self.paging.num_pool_slots, DIM, seed=12)
        self.tables, self.slots = self.paging.tables.to(CUDA), self.paging.slots.to(CUDA)

    def run(
        self,
        first: int,
        num_nodes: int,
        batch: int,
        *,
        parents: list[int] | None = None,
        path: list[int] | None = None,
        config: InvariantConfig | None = None,
    ) -> Tensor:
        """[batch, N, Q * d] behind `first` positions; node e of `path` is position first + e."""
        nodes = list(range(num_nodes)) if path is None else path
        cache, q = self.cache.clone(), normal(batch, num_nodes, HEADS, DIM, seed=13)
        for b in range(batch):
            logical = [*range(first), *(first + node for node in nodes)]
            slots = torch.from_numpy(self.paging.pool_slots(b, BLOCK)[logical]).to(CUDA)
            cache[:, :, slots] = self.kv[:, b, :, : len(logical)]
            q[b, nodes] = self.q[b, first : first + len(nodes)]
        context = torch.full((batch,), first, dtype=torch.int32, device=CUDA)
        tree = None
        if parents is not None:
            tree = torch.tensor([parents] * batch, dtype=torch.int32, device=CUDA)
        layout = tree_layout(
            tree,
            context,
            self.tables,
            self.slots[:batch],
            num_nodes=num_nodes,
            block_tokens=BLOCK,
            with_paths=True,
        )
        return invariant_attention(
            q.flatten(0, 1),
            *cache,
            tables=self.tables,
            slots=self.slots[:batch],
            context=context,
            num_nodes=num_nodes,
            positions=layout.positions,
            paths=layout.paths,
            block_tokens=BLOCK,
            max_len=self.length,
            config=config,
        ).view(batch, num_nodes, -1)


@pytest.mark.parametrize("position", [0, 63, 64, 513, 1100, 3300])
def test_rows_of_attention_keep_their_bits(position: int) -> None:
    texts, rng = Texts(64, 4096), np.random.default_rng(position)
    expected = texts.run(position, 1, 64)[:, 0]
    for batch in (1, 8, 32):
        assert torch.equal(texts.run(position, 1, batch)[:, 0], expected[:batch]), batch
    for config in (
        InvariantConfig(16, 0, 4, 2),
        InvariantConfig(32, 7, 4, 3),
        InvariantConfig(64, 3, 8, 2, max_parts=1),
    ):
        assert torch.equal(texts.run(position, 1, 2, config=config)[:, 0], expected[:2]), config
    for node, num_nodes in ((1, 2), (4, 5), (7, 8), (20, 32)):
        first = position - node
        for batch in (1, 8, 64):
            if first >= 0:
                got = texts.run(first, num_nodes, batch)[:, node]
                assert torch.equal(got, expected[:batch]), (num_nodes, batch)
    for _ in range(4):
        parents = random_parents(rng, 15)
        path = [int(rng.integers(1, 16))]
        while path[0]:
            path.insert(0, parents[path[0] - 1] + 1)
        first = position - len(path) + 1
        for batch in (1, 8):
            if first >= 0:
                got = texts.run(first, 16, batch, parents=parents, path=path)[:, path[-1]]
                assert torch.equal(got, expected[:batch]), (path, batch)


@pytest.mark.parametrize("sampling", ["greedy", "coupled", "truncated", "penalties"])
async def test_texts_do_not_depend_on_drafts(
    sampling: str, tiny_target: Path, tiny_head: Path
) -> None:
    prompts = tuple(
        tuple(np.random.default_rng(seed).integers(5, 380, 5 + 9 * seed).tolist())
        for seed in range(8)
    )

    async def texts(plan: SpeculationPlan, head: Path | None, **settings: Any) -> list[list[int]]:
        async with serving(
            tiny_target, head, batch_invariant=True, **BFLOAT16, **settings
        ) as service:
            found = await run_all(service, plan, SAMPLINGS[sampling], prompts=prompts)
        return [tokens for tokens, _ in found]

    expected = await texts(SpeculationPlan(), None)
    # The same prompts at once: each session computes them, and their KV is compared.
    twice = prompts[4:] * 2
    async with serving(
        tiny_target, batch_invariant=True, check_prefix_kv=True, **BFLOAT16
    ) as service:
        await run_all(service, SpeculationPlan(), SAMPLINGS[sampling], prompts=twice)
        counters = service.core.counters
        assert counters["prefix_kv_comparisons"] > 0
        assert counters["prefix_kv_differences"] == 0
    for placement in ("colocated", "fused"):
        for top_k, nodes in ((1, 3), (3, 8)):
            plan = SpeculationPlan(method=OWN.method, draft_tokens=nodes)
            got = await texts(
                plan, tiny_head, placement=placement, draft_length=nodes, draft_top_k=top_k
            )
            assert got == expected, (placement, top_k)


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
async def test_texts_do_not_depend_on_drafts_by_messages(
    plan: SpeculationPlan, tiny_target: Path, tiny_head: Path
) -> None:
    greedy = SAMPLINGS["greedy"]
    async with serving(tiny_target, batch_invariant=True, **BFLOAT16) as service:
        plain = [tokens for tokens, _ in await run_all(service, SpeculationPlan(), greedy)]
    known = dict(zip(PROMPTS, plain, strict=True))
    async with serving(tiny_target, tiny_head, batch_invariant=True, **BFLOAT16) as service:
        drafted = await run_drafted(service, known, plan, greedy)
    assert [tokens for tokens, _ in drafted] == plain
    assert sum(stats.accepted for _, stats in drafted) > 0
