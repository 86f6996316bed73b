"""Tree growth kernels: against their PyTorch references, and the distributions a tree must keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.kernels.attention.layout import PADDING_NODE
from outrider.engine.kernels.drafts import growth, tree_rank
from outrider.engine.kernels.drafts import inputs as draft_inputs
from outrider.engine.kernels.drafts.growth import (
    FrontierRows,
    TreeCandidates,
    empty_candidates,
    num_candidates,
)
from outrider.engine.kernels.drafts.tree_rank import TreeDraft
from outrider.engine.kernels.runtime import INTERPRETED

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
LEVELS = torch.tensor([0.0, -0.0, -0.5, -1.0, -7.0, 0.25, -math.inf, math.nan])


def level(generator: torch.Generator, rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Log-probs with many ties, and columns."""
    pick = torch.randint(0, len(LEVELS), (rows, k), generator=generator)
    columns = torch.randint(0, 50, (rows, k), generator=generator, dtype=torch.int32)
    return LEVELS[pick], columns


@interpreted
@pytest.mark.parametrize(
    ("batch", "k", "width", "depth", "nodes"), [(2, 3, 3, 3, 7), (1, 5, 4, 4, 60), (3, 1, 1, 2, 2)]
)
def test_kernels_grow_what_their_twins_grow(
    batch: int, k: int, width: int, depth: int, nodes: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    size = num_candidates(k, width, depth)
    lists = [empty_candidates(batch, size, CPU) for _ in range(2)]
    rows: list[FrontierRows | None] = [None, None]
    masks: list[Tensor | None] = [None, None]
    first = 0
    for number in range(depth):
        offered = level(generator, batch * (width if number else 1), k)
        twin = growth.select_frontier_torch(*offered, rows[0], lists[0], first, width=width)
        found = growth.select_frontier_triton(*offered, rows[1], lists[1], first, width=width)
        for one, other in zip(twin, found, strict=True):
            assert one.tolist() == other.tolist()
        first += offered[0].numel() // batch
        seen = growth.grow_mask_torch(masks[0], twin.parents)
        same = growth.grow_mask_triton(masks[1], found.parents)
        assert torch.equal(seen, same)
        masks = [seen, same]
        rows = [twin, found]
    assert first == size
    for one, other in zip(*lists, strict=True):
        assert one.tolist() == other.tolist()
    ids = torch.arange(50) * 3
    trees = (
        tree_rank.rank_tree_torch(lists[0], ids, num_nodes=nodes),
        tree_rank.rank_tree_triton(lists[1], ids, num_nodes=nodes),
    )
    for one, other in zip(*trees, strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


@interpreted
def test_places_of_parents_reach_across_the_pieces_of_a_long_list() -> None:
    """2,100 candidates: three pieces of the placing kernel."""
    generator = torch.Generator().manual_seed(3)
    parents = (torch.rand(1, 2100, generator=generator) * torch.arange(2100)).int() - 1
    scores = torch.zeros(1, 2100)
    for child in range(2100):
        above = 0.0 if parents[0, child] < 0 else scores[0, parents[0, child]]
        scores[0, child] = above - torch.rand((), generator=generator)
    columns = torch.arange(2100, dtype=torch.int32)[None] % 40
    candidates, ids = TreeCandidates(scores, columns, parents), torch.arange(40)
    twin = tree_rank.rank_tree_torch(candidates, ids, num_nodes=200)
    found = tree_rank.rank_tree_triton(candidates, ids, num_nodes=200)
    for one, other in zip(twin, found, strict=True):
        assert one.tolist() == other.tolist()
    assert_closed(twin, 200)


def assert_closed(tree: TreeDraft, nodes: int) -> None:
    """Parents before children and never below them; missing nodes last."""
    parents, logprobs = tree.parents[0].tolist(), tree.logprobs[0].tolist()
    count = sum(p != PADDING_NODE for p in parents)
    assert parents[count:] == [PADDING_NODE] * (nodes - count)
    assert tree.tokens[0, count:].tolist() == [-1] * (nodes - count)
    for node in range(count):
        assert -1 <= parents[node] < node
        assert logprobs[node] <= (logprobs[parents[node]] if parents[node] >= 0 else 0.0)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31 - 1))
@settings(max_examples=60)
def test_any_log_probs_give_an_ancestor_closed_tree(
    nodes: int, k: int, depth: int, seed: int
) -> None:
    generator, width = torch.Generator().manual_seed(seed), min(k, nodes)
    candidates = empty_candidates(1, num_candidates(k, width, depth), CPU)
    rows: FrontierRows | None = None
    first = 0
    for number in range(depth):
        offered = level(generator, width if number else 1, k)
        rows = growth.select_frontier(*offered, rows, candidates, first, width=width)
        first += offered[0].numel()
    tree = tree_rank.rank_tree(candidates, torch.arange(50), num_nodes=nodes)
    assert_closed(tree, nodes)
    existing = int((candidates.scores > -math.inf).sum())
    assert int((tree.parents != PADDING_NODE).sum()) == min(nodes, existing)


def test_rows_see_their_ancestors_and_themselves() -> None:
    first = growth.grow_mask(None, torch.tensor([[0, 0]], dtype=torch.int32))
    second = growth.grow_mask(first, torch.tensor([[1, 1]], dtype=torch.int32))
    third = growth.grow_mask(second, torch.tensor([[1, 0]], dtype=torch.int32))
    assert first.tolist() == [[[1, 0], [0, 1]]]
    assert second.tolist() == [[[0, 1, 1, 0], [0, 1, 0, 1]]]
    assert third.tolist() == [[[0, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]]]


def certain_path(depth: int) -> tuple[Tensor, Tensor]:
    """A path of `depth` all but certain tokens: its probabilities, and the nodes' parents."""
    return torch.full((depth,), 1.0 - 2.0**-12), torch.arange(-1, depth - 1)


def is_torn(scores: Tensor, parents: Tensor, nodes: int) -> bool:
    """Whether some order of equal scores puts a child into the best `nodes`, and not its parent.

    The worst order lists the later candidate first, as an unstable top-k may.
    """
    order = scores.flip(0).sort(descending=True, stable=True).indices[:nodes]
    chosen = set((len(scores) - 1 - order).tolist())
    return any(int(parents[c]) >= 0 and int(parents[c]) not in chosen for c in chosen)


def test_products_in_bfloat16_tear_a_tree_that_sums_of_logs_keep_whole() -> None:
    probs, parents = certain_path(40)
    products = probs.bfloat16().cumprod(0)
    sums = probs.log().cumsum(0)
    assert len(set(products.tolist())) == 1 and len(set(sums.tolist())) == 40
    for nodes in range(1, 40):
        assert is_torn(products, parents, nodes)
        assert not is_torn(sums, parents, nodes)


def test_ties_never_cost_a_child_its_parent() -> None:
    """Log-probs of exactly 0, where sums tie too: the lower candidate index decides."""
    candidates = empty_candidates(1, num_candidates(2, 2, 6), CPU)
    rows: FrontierRows | None = None
    first = 0
    for number in range(6):
        count = 2 if number else 1
        offered = torch.zeros(count, 2), torch.zeros(count, 2, dtype=torch.int32)
        rows = growth.select_frontier(*offered, rows, candidates, first, width=2)
        first += 2 * count
    for nodes in range(1, 20):
        tree = tree_rank.rank_tree(candidates, torch.arange(2), num_nodes=nodes)
        assert_closed(tree, nodes)
        assert int((tree.parents != PADDING_NODE).sum()) == nodes


@interpreted
@pytest.mark.parametrize(("rows", "steps", "width"), [(3, 0, 1), (1, 4, 1), (5, 3, 2)])
def test_the_layout_kernel_is_its_twin(rows: int, steps: int, width: int) -> None:
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(5, 4).int()
    slots = torch.tensor([2, 0, 4], dtype=torch.int32)
    # The last session has no rows; the second one's run past the end of its table.
    counts = torch.tensor([min(rows, 2), rows, 0], dtype=torch.int32)
    starts = torch.tensor([0, 7, 0], dtype=torch.int32)
    twin, found = (
        layout(
            counts,
            starts,
            tables,
            slots,
            num_rows=rows,
            num_steps=steps,
            step_rows=width,
            block_tokens=2,
        )
        for layout in (draft_inputs.draft_layout_torch, draft_inputs.draft_layout_triton)
    )
    for one, other in zip(twin, found, strict=True):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert twin.write_slots[:1].tolist() == [int(tables[2, 0]) * 2]
    if rows > 1:
        assert twin.write_slots[rows + 1] == -1, "slot 8 of a table of 8"
    assert (twin.write_slots[2 * rows : 3 * rows] == -1).all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_the_input_kernel_is_its_twin(dtype: torch.dtype, gathered: bool, normed: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens = torch.tensor([3, -1, 0, 5], dtype=torch.int32)
    arguments = (tokens, random(4, 24), random(30, 24), random(24), random(24))
    twin, found = (
        inputs(
            *arguments,
            eps=1e-5,
            ids=torch.tensor([4, 9, 11, 12, 20, 29]) if gathered else None,
            rows=torch.tensor([2, 2, 0, 3], dtype=torch.int32) if gathered else None,
            norm_before_residual=normed,
        )
        for inputs in (draft_inputs.head_inputs_torch, draft_inputs.head_inputs_triton)
    )
    for one, other in zip(twin, found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(
            one, other, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
