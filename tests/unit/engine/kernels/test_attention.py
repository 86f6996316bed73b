"""Paged tree attention: the PyTorch reference against the engine's own attention, the kernels
against it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.engine.attention import plan_segment
from outrider.engine.kernels.attention.config import (
    AttentionConfig,
)
from outrider.engine.kernels.attention.layout import tree_layout
from outrider.engine.kernels.attention.tree import (
    tree_attention,
    tree_attention_torch,
    tree_attention_triton,
)
from outrider.engine.kv_cache import KVPool
from outrider.errors import InvalidRequestError
from tests.grids import thorough
from tests.unit.engine.kernels.trees import Paging, random_parents, scattered

BLOCK = 4
WIDTH = 11
# Sums in another order; in 16-bit types the weights of the values are rounded too.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    keywords: dict[str, Any]
    paging: Paging


def _case(
    *,
    contexts: tuple[int, ...] = (21, 0, 6),
    num_nodes: int = 5,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    tree: bool = True,
    window: int | None = None,
    blocks: int = WIDTH,
    seed: int = 0,
) -> Case:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    batch = len(contexts)
    paging = scattered(rng, batch, blocks, BLOCK)
    context = torch.tensor(contexts, dtype=torch.int32)
    parents = [random_parents(rng, num_nodes - 1, padded=b % num_nodes) for b in range(batch)]
    layout = tree_layout(
        torch.tensor(parents, dtype=torch.int32).view(batch, -1) if tree else None,
        context,
        paging.tables,
        paging.slots,
        num_nodes=num_nodes,
        block_tokens=BLOCK,
    )
    cache = torch.randn(2, kv_heads, paging.num_pool_slots, dim, generator=generator).to(dtype)
    qkv = torch.randn(batch * num_nodes, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    keywords = {
        "tables": paging.tables,
        "slots": paging.slots,
        "context": context,
        "num_nodes": num_nodes,
        "mask": layout.mask,
        "block_tokens": BLOCK,
        "positions": layout.positions,
        "window": window,
        "max_len": blocks * BLOCK,
    }
    return Case(qkv[:, :heads], cache[0], cache[1], keywords, paging)


def _plain(case: Case, b: int) -> Tensor:
    """float64 [N, Q, d] of row b: each session's slots in order, one dense masked softmax."""
    keywords = case.keywords
    nodes, context = keywords["num_nodes"], int(keywords["context"][b])
    mask = keywords["mask"]
    own = torch.ones(nodes, nodes).tril().bool() if mask is None else mask[b].bool()
    slots = torch.from_numpy(case.paging.pool_slots(b, BLOCK)[: context + own.shape[1]])
    own = own[:, : len(slots) - context]
    seen = torch.cat((torch.ones(nodes, context, dtype=torch.bool), own), dim=1)
    if keywords["window"] is not None:
        rows = keywords["positions"].view(-1, nodes)[b]
        places = torch.cat((torch.arange(context), rows))
        seen &= places > rows[:, None] - keywords["window"]
    queries = case.q[b * nodes : (b + 1) * nodes].double().transpose(0, 1)
    group = queries.shape[0] // case.keys.shape[0]
    k = case.keys[:, slots].double().repeat_interleave(group, 0)
    v = case.values[:, slots].double().repeat_interleave(group, 0)
    out = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=seen, scale=keywords.get("scale")
    ).transpose(0, 1)
    return out.masked_fill(~seen.any(1)[:, None, None], 0.0)


def _assert_right(got: Tensor, case: Case) -> None:
    nodes = case.keywords["num_nodes"]
    expected = torch.cat([_plain(case, b) for b in range(len(case.keywords["context"]))])
    assert got.dtype == case.q.dtype and got.shape == (expected.shape[0], expected[0].numel())
    assert expected.shape[0] == nodes * len(case.keywords["context"])
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(got.double(), expected.flatten(1), atol=tolerance, rtol=tolerance)


def _both(case: Case, config: AttentionConfig | None = None) -> None:
    arguments = (case.q, case.keys, case.values)
    _assert_right(tree_attention_torch(*arguments, **case.keywords), case)
    _assert_right(tree_attention_triton(*arguments, **case.keywords, config=config), case)


def _config(splits: int, rows: int = 16, slots: int = 16) -> AttentionConfig:
    return AttentionConfig(rows, slots, splits, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("splits", [1, 3])
def test_trees_over_scattered_blocks(dtype: torch.dtype, splits: int) -> None:
    _both(_case(dtype=dtype), _config(splits))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (6, 1), (16, 1), (4, 4)])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_groups_of_any_size(heads: int, kv_heads: int, num_nodes: int) -> None:
    case = _case(heads=heads, kv_heads=kv_heads, num_nodes=num_nodes, tree=num_nodes > 1)
    _both(case, _config(2))


@pytest.mark.parametrize("dim", [6, 24, 80])
def test_head_dimensions_that_are_no_power_of_two(dim: int) -> None:
    _both(_case(dim=dim, contexts=(18, 3)), _config(2))


@pytest.mark.parametrize("tree", [False, True])
def test_more_query_rows_than_one_tile(tree: bool) -> None:
    _both(_case(num_nodes=9, heads=6, kv_heads=2, tree=tree, contexts=(33, 4)), _config(2))


@pytest.mark.parametrize("window", [None, 40])
def test_chunks_of_one_prompt_in_tiles_of_128_rows(window: int | None) -> None:
    """The chunks of a prompt are rows of the same session, one behind the other."""
    case = _case(
        contexts=(6, 38, 70),
        num_nodes=32,
        heads=8,
        kv_heads=2,
        tree=False,
        window=window,
        blocks=26,
    )
    case.keywords["slots"][:] = case.keywords["slots"][0].clone()
    case.paging.tables[:] = case.paging.tables[case.keywords["slots"][0]].clone()
    config = AttentionConfig(128, 64, 1, num_warps=4, num_stages=3)
    _both(case, config)


@pytest.mark.parametrize("splits", [1, thorough(2), 7])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 31, 32, 39])
def test_context_lengths_around_a_step(context: int, splits: int) -> None:
    _both(_case(contexts=(context,), num_nodes=5), _config(splits))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window", [1, 3, 20, 100])
def test_window_hides_old_positions(window: int, tree: bool) -> None:
    case = _case(window=window, tree=tree, contexts=(35, 0, 6), seed=window)
    _both(case, _config(1))
    _both(case, _config(2))


def test_frontier_rows_see_more_slots_than_they_are() -> None:
    case = _case(num_nodes=3, contexts=(20, 0, 7))
    generator = torch.Generator().manual_seed(9)
    mask = torch.randint(0, 2, (3, 3, 11), generator=generator, dtype=torch.uint8)
    mask[1, 2] = 0
    case.keywords["mask"] = mask
    _both(case, _config(2))
    _both(case, _config(1))


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    case = _case(contexts=(0, 0), num_nodes=3)
    mask = case.keywords["mask"].clone()
    mask[0, 1] = 0
    case.keywords["mask"] = mask
    for splits in (1, 3):
        got = tree_attention_triton(
            case.q, case.keys, case.values, **case.keywords, config=_config(splits)
        )
        assert torch.equal(got[1], torch.zeros_like(got[1]))
        _assert_right(got, case)


GROUP = {"heads": 2, "kv_heads": 1}
"""Of the cases that cut the context in every way: how the heads are grouped has tests above."""
SHAPES: dict[str, dict[str, Any]] = {
    "one": {"num_nodes": 1, "tree": False},
    "chain": {"tree": False},
    "tree": {},
    "window": {"window": 4},
    "chain with a window": {"window": 20, "tree": False},
    "several tiles": {"heads": 3, "num_nodes": 11},
    "a tile that is not full": {"heads": 3, "num_nodes": 3, "dim": 24},
}


# Nine parts differ from five in how many have nothing to do, two from five in that none has.
@pytest.mark.parametrize("splits", [1, thorough(2), 5, thorough(9)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parts_of_every_length_are_joined(shape: dict[str, Any], splits: int) -> None:
    """Six steps, two and one: among five or nine parts are some that have nothing to do."""
    case = _case(contexts=(85, 20, 0), blocks=24, **(GROUP | shape))
    arguments = (case.q, case.keys, case.values)
    got = tree_attention_triton(*arguments, **case.keywords, config=_config(splits))
    _assert_right(got, case)
    if splits > 1:
        # The parts count themselves in, and leave the counters as they found them.
        again = tree_attention_triton(*arguments, **case.keywords, config=_config(splits))
        assert torch.equal(again, got)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("width", [1, thorough(31), 63, 64, 65, thorough(90), 128, 135])
def test_masks_of_every_width(width: int, splits: int) -> None:
    case = _case(num_nodes=3, contexts=(20, 0, 41), blocks=42, **GROUP)
    generator = torch.Generator().manual_seed(width)
    # Whatever is not 0 is seen.
    mask = torch.randint(0, 4, (3, 3, width), generator=generator) * 85
    case.keywords["mask"] = mask.to(torch.uint8)
    case.keywords["mask"][:, 1, -1] = 1
    _both(case, _config(splits))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_window_that_hides_all_that_is_left_gives_zeros(splits: int) -> None:
    case = _case(contexts=(48,), num_nodes=2, tree=False, window=1, blocks=12)
    got = tree_attention_triton(
        case.q, case.keys, case.values, **case.keywords, config=_config(splits)
    )
    assert torch.equal(got, torch.zeros_like(got))


def test_slots_past_the_table_are_not_seen() -> None:
    _both(_case(contexts=(WIDTH * BLOCK - 2,), num_nodes=4, tree=False), _config(2))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("width", [None, 5, 70, 140])
def test_a_context_past_the_table_ends_with_the_table(width: int | None, splits: int) -> None:
    case = _case(contexts=(WIDTH * BLOCK - 2,), tree=width is not None)
    # Laid out for a context that fits; the table is the same.
    case.keywords["context"] += 8
    if width is not None:
        case.keywords["mask"] = torch.ones((1, 5, width), dtype=torch.uint8)
    arguments = (case.q, case.keys, case.values)
    got = tree_attention_triton(*arguments, **case.keywords, config=_config(splits))
    expected = tree_attention_torch(*arguments, **case.keywords)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("where", ["query", "key", "value", "infinite key"])
def test_what_is_not_finite_is_not_hidden_by_parts(where: str, splits: int) -> None:
    case = _case(contexts=(85,), blocks=24, num_nodes=2, tree=False)
    slot = case.paging.pool_slots(0, BLOCK)[3]
    if where == "query":
        case.q[:] = torch.nan
    elif where == "value":
        case.values[:, slot] = torch.nan
    else:
        case.keys[:, slot] = torch.nan if where == "key" else torch.inf
    for attention in (tree_attention_torch, tree_attention_triton):
        got = attention(case.q, case.keys, case.values, **case.keywords, config=_config(splits))
        assert bool(got.isnan().any(dim=1).all())


def test_scale_of_the_scores() -> None:
    case = _case()
    case.keywords["scale"] = 0.7
    _both(case, _config(2))


def test_default_launch_parameters_and_dispatch() -> None:
    case = _case()
    _both(case)
    arguments = (case.q, case.keys, case.values)
    got = tree_attention(*arguments, **case.keywords)
    assert torch.equal(got, tree_attention_torch(*arguments, **case.keywords))


@pytest.mark.parametrize("splits", [1, thorough(2), 5])
@pytest.mark.parametrize("width", [None, 5, 70])
def test_what_is_past_the_end_never_matters(width: int | None, splits: int) -> None:
    case = _case(contexts=(21, 0, 6), tree=width is not None, blocks=26)
    if width == 70:
        case.keywords["mask"] = torch.ones((3, 5, 70), dtype=torch.uint8).tril(60)
    arguments = (case.q, case.keys, case.values)
    before = tree_attention_triton(*arguments, **case.keywords, config=_config(splits))
    for b, context in enumerate((21, 0, 6)):
        unused = case.paging.pool_slots(b, BLOCK)[context + (width or 5) :]
        case.keys[:, unused] = torch.nan
        case.values[:, unused] = torch.nan
    after = tree_attention_triton(*arguments, **case.keywords, config=_config(splits))
    assert torch.equal(after, before)
    got = tree_attention_torch(*arguments, **case.keywords)
    torch.testing.assert_close(got, before, atol=2e-6, rtol=2e-6)


def test_twin_is_the_attention_of_the_engine() -> None:
    """One session of a pool: the same rows through the CPU path and through the PyTorch
    reference."""
    heads, kv_heads, dim, context, nodes = 4, 2, 16, 10, 4
    pool = KVPool(
        num_layers=1, num_kv_heads=kv_heads, head_dim=dim, num_blocks=6, block_tokens=BLOCK
    )
    generator = torch.Generator().manual_seed(5)
    sequence = pool.allocate(20)
    pool.storage.normal_(generator=generator)
    sequence.begin(torch.arange(context))
    sequence.commit(range(context))
    layout = tree_layout(
        torch.tensor([[-1, -1, 0]], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        torch.tensor([list(sequence.blocks)], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        num_nodes=nodes,
        block_tokens=BLOCK,
    )
    assert layout.mask is not None
    sequence.begin(layout.positions)
    qkv = torch.randn(nodes, heads + 2 * kv_heads, dim, generator=generator)
    plan = plan_segment(
        sequence,
        pool,
        slice(0, nodes),
        mask=layout.mask[0].bool(),
        window=5,
        num_heads=heads,
        dtype=torch.float32,
    )
    expected = plan.attend(0, qkv, heads)
    got = tree_attention_torch(
        qkv[:, :heads],
        pool.storage[0, 0],
        pool.storage[1, 0],
        tables=torch.tensor([list(sequence.blocks)], dtype=torch.int32),
        slots=torch.tensor([0], dtype=torch.int32),
        context=torch.tensor([context], dtype=torch.int32),
        num_nodes=nodes,
        mask=layout.mask,
        block_tokens=BLOCK,
        positions=layout.positions,
        window=5,
        max_len=context + nodes,
    )
    torch.testing.assert_close(got, expected.reshape(nodes, -1), atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = _case()
    arguments = (case.q, case.keys, case.values)
    with pytest.raises(InvalidRequestError, match="queries"):
        tree_attention(*arguments, **(case.keywords | {"num_nodes": 4}))
    with pytest.raises(InvalidRequestError, match="mask"):
        tree_attention(*arguments, **(case.keywords | {"mask": case.keywords["mask"][:2]}))
    for mask in (case.keywords["mask"][0], case.keywords["mask"][:, :, :0]):
        with pytest.raises(InvalidRequestError, match="mask"):
            tree_attention(*arguments, **(case.keywords | {"mask": mask}))
    across = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    for wrong in (
        (across, case.keys, case.values),
        (case.q, case.keys, case.values[:, 1:]),
        (case.q, case.keys.transpose(1, 2).contiguous().transpose(1, 2), case.values),
    ):
        with pytest.raises(InvalidRequestError, match="contiguous"):
            tree_attention(*wrong, **case.keywords)
    far = torch.empty_strided(case.q.shape, (2**28, 16, 1), device="meta")
    with pytest.raises(InvalidRequestError, match="fewer than 2"):
        tree_attention(far, *arguments[1:], **case.keywords)
    with pytest.raises(InvalidRequestError, match="window"):
        tree_attention(*arguments, **(case.keywords | {"window": 3, "positions": None}))
