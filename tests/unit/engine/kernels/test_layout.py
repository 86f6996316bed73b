"""Positions, slots and masks of a round against the verifier's own rows of a tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from outrider_verifier.model_runner.batch import tree_mask

from outrider.engine.kernels.attention.layout import (
    RoundLayout,
    pool_slots,
    tree_layout,
    tree_layout_torch,
    tree_layout_triton,
)
from outrider.errors import InvalidRequestError
from outrider.spec.tree import DraftTree, depths
from tests.unit.engine.kernels.trees import PADDING, random_parents, scattered

BLOCK = 4
IMPLEMENTATIONS = (tree_layout_torch, tree_layout_triton)


def _int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _assert_same(got: RoundLayout, expected: RoundLayout) -> None:
    for one, other in zip(got, expected, strict=True):
        if other is None:
            assert one is None
        else:
            assert one is not None and one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("layout", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_nodes", [2, 5, 9, 65])
def test_layout_is_that_of_the_verifier(layout: object, num_nodes: int) -> None:
    rng = np.random.default_rng(num_nodes)
    batch, width = 3, 20
    paging = scattered(rng, batch, width, BLOCK)
    parents = [random_parents(rng, num_nodes - 1) for _ in range(batch)]
    context = [7, 0, 12]
    assert callable(layout)
    got: RoundLayout = layout(
        _int32(parents),
        _int32(context),
        paging.tables,
        paging.slots,
        num_nodes=num_nodes,
        block_tokens=BLOCK,
    )
    assert got.mask is not None and got.paths is None
    for b, row_parents in enumerate(parents):
        array = np.array(row_parents, dtype=np.int32)
        tree = DraftTree(np.zeros_like(array), array, np.zeros(len(array), dtype=np.float32))
        mask = tree_mask(tree)
        if mask is None:
            mask = np.tri(num_nodes, dtype=np.bool_)
        assert np.array_equal(got.mask[b].numpy(), mask)
        rows = slice(b * num_nodes, (b + 1) * num_nodes)
        expected = context[b] + np.concatenate(([0], depths(array)))
        assert got.positions[rows].tolist() == expected.tolist()
        slots = paging.pool_slots(b, BLOCK)[context[b] : context[b] + num_nodes]
        assert got.write_slots[rows].tolist() == slots.tolist()


@pytest.mark.parametrize("layout", IMPLEMENTATIONS)
def test_a_padding_node_sees_itself_only(layout: object) -> None:
    assert callable(layout)
    got: RoundLayout = layout(
        _int32([[-1, PADDING, 0, PADDING]]),
        _int32([6]),
        _int32([[0, 1, 2]]),
        _int32([0]),
        num_nodes=5,
        block_tokens=BLOCK,
        with_paths=True,
    )
    assert got.positions.tolist() == [6, 7, 6, 8, 6]
    assert got.paths is not None
    assert got.paths[0].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [2, 0, 0, 0, 0],
        [0, 1, 3, 0, 0],
        [4, 0, 0, 0, 0],
    ]
    assert got.mask is not None
    assert got.mask[0].tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("layout", IMPLEMENTATIONS)
def test_chains_need_no_mask(layout: object) -> None:
    assert callable(layout)
    got: RoundLayout = layout(
        None, _int32([2, 0]), _int32([[5, 1], [3, 2]]), _int32([1, 0]), num_nodes=3, block_tokens=2
    )
    assert got.mask is None
    assert got.positions.tolist() == [2, 3, 4, 0, 1, 2]
    # Session 1 holds four slots: the third row of the first chain has no place.
    assert got.write_slots.tolist() == [4, 5, -1, 10, 11, 2]


def test_kernel_agrees_with_its_twin_on_padded_trees() -> None:
    rng = np.random.default_rng(8)
    paging = scattered(rng, 4, 4, BLOCK)
    parents = _int32([random_parents(rng, 6, padded=padded) for padded in (0, 2, 5, 6)])
    arguments = (parents, _int32([0, 3, 9, 14]), paging.tables, paging.slots)
    _assert_same(
        tree_layout_triton(*arguments, num_nodes=7, block_tokens=BLOCK, with_paths=True),
        tree_layout_torch(*arguments, num_nodes=7, block_tokens=BLOCK, with_paths=True),
    )


def test_pool_slots_have_no_place_past_the_table() -> None:
    tables = _int32([[3, 1], [0, 2]])
    got = pool_slots(tables, _int32([1]), _int32([[0, 3, 4, 7, 8, 99]]), 4)
    assert got.tolist() == [[0, 3, 8, 11, -1, -1]]


def test_a_single_root_needs_no_parents() -> None:
    arguments = (torch.empty((2, 0), dtype=torch.int32), _int32([1, 2]), _int32([[0], [1]]))
    for layout in IMPLEMENTATIONS:
        got = layout(*arguments, _int32([0, 1]), num_nodes=1, block_tokens=BLOCK)
        assert got.positions.tolist() == [1, 2]
        assert got.mask is not None and got.mask.tolist() == [[[1]], [[1]]]


def test_parents_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="parents of shape"):
        tree_layout(
            _int32([[0, 1]]), _int32([1]), _int32([[0]]), _int32([0]), num_nodes=2, block_tokens=4
        )
