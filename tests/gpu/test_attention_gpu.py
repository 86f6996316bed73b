"""Layout, rotary, attention and compaction on a GPU, at real shapes, against float64 and PyTorch
references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.engine.kernels.attention.compaction import (
    compact_kv,
    compact_kv_torch,
    gather_rows,
    gather_rows_torch,
)
from outrider.engine.kernels.attention.config import AttentionConfig, choose_config
from outrider.engine.kernels.attention.layout import tree_layout, tree_layout_torch
from outrider.engine.kernels.attention.rotary import (
    rotary_table,
    rotary_table_torch,
    rotary_write,
    rotary_write_torch,
)
from outrider.engine.kernels.attention.tree import tree_attention, tree_attention_torch
from tests.unit.engine.kernels.trees import random_parents, scattered

pytestmark = pytest.mark.gpu

BLOCK = 16
# Relative error in the Frobenius norm: weights and results of 8, 11 and 24 bits.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 3e-6}


class Shape(NamedTuple):
    """Heads as in a model, rows as in a bucket."""

    contexts: tuple[int, ...]
    num_nodes: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    width: int | None = None
    """W, where it is not the number of nodes."""


SHAPES = {
    "8b_chain_1": Shape((512,), 1),
    "8b_chain_8": Shape((511,), 8),
    "8b_tree_64": Shape((530,), 65),
    "8b_long": Shape((8191,), 6),
    "8b_batch": Shape(tuple(range(0, 700, 22)), 6),
    "8b_batch_1": Shape(tuple(range(3, 900, 14)), 1),
    "8b_window": Shape((1000, 40, 0, 128), 8, window=128),
    "smol": Shape((300, 17, 0), 9, heads=9, kv_heads=3, dim=64),
    "head_80": Shape((77, 512), 8, heads=32, kv_heads=32, dim=80),
    "head_96": Shape((600,), 33, heads=6, kv_heads=1, dim=96),
    "head_256": Shape((511, 2), 8, heads=16, kv_heads=1, dim=256),
    "frontier": Shape((512, 33), 8, width=40),
    "frontier_wide": Shape((512, 33, 0), 10, width=70),
    "frontier_wider": Shape((512, 33, 0), 10, width=140),
    "8b_trees_64": Shape((530, 0, 77), 64),
}


class Case(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    keywords: dict[str, Any]


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, *, tree: bool = True) -> Case:
    rng = np.random.default_rng(len(shape.contexts) + shape.num_nodes)
    generator = torch.Generator(device).manual_seed(shape.num_nodes)
    batch, nodes = len(shape.contexts), shape.num_nodes
    longest = max(shape.contexts) + max(shape.width or 0, nodes)
    paging = scattered(rng, batch, -(-longest // BLOCK) + 3, BLOCK)
    parents = [
        random_parents(rng, nodes - 1, padded=b % 3 if nodes > 3 else 0) for b in range(batch)
    ]
    tables, slots = paging.tables.to(device), paging.slots.to(device)
    context = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
    layout = tree_layout(
        torch.tensor(parents, dtype=torch.int32, device=device).view(batch, -1) if tree else None,
        context,
        tables,
        slots,
        num_nodes=nodes,
        block_tokens=BLOCK,
    )
    mask = layout.mask
    if shape.width is not None:
        mask = torch.rand((batch, nodes, shape.width), generator=generator, device=device) < 0.5
        mask = mask.to(torch.uint8)
    size = (2, shape.kv_heads, paging.num_pool_slots, shape.dim)
    cache = torch.randn(size, generator=generator, device=device, dtype=dtype)
    fused = (batch * nodes, shape.heads + 2 * shape.kv_heads, shape.dim)
    qkv = torch.randn(fused, generator=generator, device=device, dtype=dtype)
    keywords = {
        "tables": tables,
        "slots": slots,
        "context": context,
        "num_nodes": nodes,
        "mask": mask,
        "block_tokens": BLOCK,
        "positions": layout.positions,
        "window": shape.window,
        "max_len": tables.shape[1] * BLOCK,
    }
    return Case(qkv[:, : shape.heads], cache[0], cache[1], keywords)


def _reference(case: Case) -> Tensor:
    """float64 [M, Q * d], on the host, one session at a time."""
    words = case.keywords
    nodes, results = words["num_nodes"], []
    tables, slots = words["tables"].cpu().long(), words["slots"].tolist()
    k_all, v_all, q_all = case.keys.cpu(), case.values.cpu(), case.q.cpu()
    for b, context in enumerate(words["context"].tolist()):
        mask = words["mask"]
        own = torch.ones(nodes, nodes).tril().bool() if mask is None else mask[b].bool().cpu()
        index = torch.arange(context + own.shape[1])
        pool = tables[slots[b]][index // BLOCK] * BLOCK + index % BLOCK
        seen = torch.cat((torch.ones(nodes, context, dtype=torch.bool), own), dim=1)
        if words["window"] is not None:
            rows = words["positions"].view(-1, nodes)[b].cpu()
            seen &= torch.cat((index[:context], rows)) > rows[:, None] - words["window"]
        k, v = k_all[:, pool].double(), v_all[:, pool].double()
        q = q_all[b * nodes : (b + 1) * nodes].double()
        q = q.reshape(nodes, k.shape[0], -1, q.shape[2])
        scores = torch.einsum("nhgd,hld->nhgl", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
        weights = weights.masked_fill(~seen.any(1)[:, None, None, None], 0.0)
        results.append(torch.einsum("nhgl,hld->nhgd", weights, v).flatten(1))
    return torch.cat(results)


def _error(got: Tensor, expected: Tensor) -> float:
    difference = got.cpu().double() - expected
    return float(difference.norm() / expected.norm())


def _captured(launch: Callable[[], Tensor]) -> Tensor:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_trees(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = _case(SHAPES[name], dtype, device)
    got = tree_attention(case.q, case.keys, case.values, **case.keywords)
    assert _error(got, _reference(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["8b_chain_8", "8b_batch", "8b_window", "8b_trees_64", "smol"])
def test_attention_of_chains(name: str, device: torch.device) -> None:
    case = _case(SHAPES[name], torch.bfloat16, device, tree=False)
    got = tree_attention(case.q, case.keys, case.values, **case.keywords)
    assert _error(got, _reference(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("splits", [1, 2, 5, 9, 32])
@pytest.mark.parametrize("block_slots", [16, 64, 128])
def test_every_way_to_cut_the_work_gives_the_same(
    block_slots: int, splits: int, device: torch.device
) -> None:
    case = _case(SHAPES["8b_batch"], torch.bfloat16, device)
    config = AttentionConfig(32, block_slots, splits, num_warps=4, num_stages=3)
    got = tree_attention(case.q, case.keys, case.values, **case.keywords, config=config)
    assert _error(got, _reference(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("block_rows", [16, 32, 64])
def test_every_way_to_cut_a_large_tree_gives_the_same(
    block_rows: int, splits: int, num_stages: int, device: torch.device
) -> None:
    case = _case(SHAPES["8b_tree_64"], torch.bfloat16, device)
    config = AttentionConfig(block_rows, 64, splits, num_warps=4, num_stages=num_stages)
    got = tree_attention(case.q, case.keys, case.values, **case.keywords, config=config)
    assert _error(got, _reference(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["8b_chain_1", "8b_chain_8", "8b_tree_64", "8b_long"])
def test_the_same_bits_whichever_program_comes_last(name: str, device: torch.device) -> None:
    case = _case(SHAPES[name], torch.bfloat16, device)
    first = tree_attention(case.q, case.keys, case.values, **case.keywords)
    for _ in range(200):
        again = tree_attention(case.q, case.keys, case.values, **case.keywords)
        assert torch.equal(again, first)


def test_a_captured_launch_gives_the_same_bits_every_time(device: torch.device) -> None:
    case = _case(SHAPES["8b_chain_8"], torch.bfloat16, device)

    def launch() -> Tensor:
        return tree_attention(case.q, case.keys, case.values, **case.keywords)

    eager = launch()
    for _ in range(3):
        assert torch.equal(_captured(launch), eager)


def test_a_row_that_sees_nothing_gives_zeros(device: torch.device) -> None:
    case = _case(SHAPES["8b_trees_64"], torch.bfloat16, device)
    case.keywords["mask"][1, 3] = 0
    got = tree_attention(case.q, case.keys, case.values, **case.keywords)
    assert not got[64 + 3].any()
    assert _error(got, _reference(case)) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_contexts_that_grow(device: torch.device) -> None:
    case = _case(SHAPES["8b_batch"], torch.bfloat16, device)

    def launch() -> Tensor:
        return tree_attention(case.q, case.keys, case.values, **case.keywords)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    for _ in range(3):
        case.keywords["context"].add_(13).clamp_(max=690)
        graph.replay()
        torch.cuda.synchronize()
        assert _error(out, _reference(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["8b_batch", "8b_trees_64"])
def test_what_lies_past_the_end_never_matters(name: str, device: torch.device) -> None:
    case = _case(SHAPES[name], torch.bfloat16, device)
    before = tree_attention(case.q, case.keys, case.values, **case.keywords)
    words = case.keywords
    read = torch.zeros(case.keys.shape[1], dtype=torch.bool)
    for slot, context in zip(words["slots"].tolist(), words["context"].tolist(), strict=True):
        index = torch.arange(context + words["num_nodes"])
        read[words["tables"][slot].cpu().long()[index // BLOCK] * BLOCK + index % BLOCK] = True
    unread = (~read).to(device)
    case.keys[:, unread] = torch.nan
    case.values[:, unread] = torch.nan
    after = tree_attention(case.q, case.keys, case.values, **case.keywords)
    assert torch.equal(after, before)


def test_twin_on_the_device_agrees(device: torch.device) -> None:
    case = _case(SHAPES["8b_batch"], torch.bfloat16, device)
    arguments = (case.q, case.keys, case.values)
    got = tree_attention(*arguments, **case.keywords)
    expected = tree_attention_torch(*arguments, **case.keywords)
    assert _error(got, expected.cpu().double()) < 2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("num_nodes", [1, 8, 65])
def test_default_launch_parameters_fit_the_device(
    num_nodes: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = Shape((100, 0), num_nodes, heads=16, kv_heads=2, dim=head_dim)
    case = _case(shape, dtype, device)
    config = choose_config(
        batch=2,
        num_nodes=num_nodes,
        num_heads=16,
        num_kv_heads=2,
        head_dim=head_dim,
        itemsize=dtype.itemsize,
        max_len=case.keywords["max_len"],
    )
    got = tree_attention(case.q, case.keys, case.values, **case.keywords, config=config)
    assert _error(got, _reference(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_nodes", [2, 7, 65])
@pytest.mark.parametrize("tree", [False, True])
def test_layout_is_its_twin_to_the_bit(num_nodes: int, tree: bool, device: torch.device) -> None:
    rng = np.random.default_rng(num_nodes)
    paging = scattered(rng, 64, 40, BLOCK)
    parents = [random_parents(rng, num_nodes - 1, padded=b % num_nodes) for b in range(64)]
    context = torch.arange(0, 640, 10, dtype=torch.int32)
    arguments = (torch.tensor(parents, dtype=torch.int32) if tree else None, context, *paging[:2])
    expected = tree_layout_torch(*arguments, num_nodes=num_nodes, block_tokens=BLOCK)
    moved = [None if a is None else a.to(device) for a in arguments]
    got = tree_layout(*moved, num_nodes=num_nodes, block_tokens=BLOCK)  # type: ignore[arg-type]
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        assert other is None or (one is not None and torch.equal(one.cpu(), other))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (32, 32, 80), (16, 2, 256)]
)
def test_rotary_write(
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rows = 37
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    norms = torch.rand(heads + kv_heads, dim, generator=generator).to(dtype) if normed else None
    positions = torch.randint(0, 8000, (rows,), generator=generator, dtype=torch.int32)
    inv_freq = 1.0 / (5e5 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    table = rotary_table_torch(positions, inv_freq)
    on_device = rotary_table(positions.to(device), inv_freq.to(device))
    torch.testing.assert_close(on_device.cpu(), table, atol=2e-6, rtol=0)
    slots = torch.randperm(64, generator=generator)[:rows]
    slots[5] = -1
    cache = torch.randn(2, kv_heads, 64, dim, generator=generator).to(dtype)
    source, moved = qkv.to(device), cache.to(device)
    options: dict[str, Any] = {"num_heads": heads, "interleaved": interleaved, "eps": 1e-5}
    expected = rotary_write_torch(qkv, table, slots, *cache, qk_norms=norms, **options)
    norms = None if norms is None else norms.to(device)
    got = rotary_write(source, on_device, slots.to(device), *moved, qk_norms=norms, **options)
    # One rounding to the dtype, after another for the norm.
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(got.cpu(), expected, atol=bound, rtol=bound)
    torch.testing.assert_close(moved[0].cpu(), cache[0], atol=bound, rtol=bound)
    assert torch.equal(moved[1].cpu(), cache[1])


@pytest.mark.parametrize("num_nodes", [2, 6, 65])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_compaction_is_its_twin_to_the_bit(num_nodes: int, dim: int, device: torch.device) -> None:
    rng = np.random.default_rng(num_nodes)
    paging = scattered(rng, 16, 12, BLOCK)
    rows = np.tile(np.arange(num_nodes, dtype=np.int32), (16, 1))
    counts = rng.integers(1, num_nodes + 1, size=16).astype(np.int32)
    for b, count in enumerate(counts):
        rows[b, 1:count] = np.sort(rng.permutation(np.arange(1, num_nodes))[: count - 1])
    context = torch.arange(0, 112, 7, dtype=torch.int32)
    storage = torch.randn(2, 4, 8, paging.num_pool_slots, dim).bfloat16()
    arguments = (torch.from_numpy(rows), torch.from_numpy(counts), context, *paging[:2])
    moved = [a.to(device) for a in (storage, *arguments)]
    compact_kv(*moved, block_tokens=BLOCK)
    compact_kv_torch(storage, *arguments, block_tokens=BLOCK)
    assert torch.equal(moved[0].cpu(), storage)
    features = torch.randn(16 * num_nodes, 4096).bfloat16()
    got = gather_rows(features.to(device), moved[1], num_nodes=num_nodes)
    expected = gather_rows_torch(features, arguments[0], num_nodes=num_nodes)
    assert torch.equal(got.cpu(), expected)
