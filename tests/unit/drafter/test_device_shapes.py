"""Whatever a plan asks for, a drafter on a device drafts in one of the shapes that it captured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.device_shapes import CHAIN_LENGTHS, TREES, Shape, family, fitted

SHAPES = {shape for shape, _ in family()}


@given(st.integers(1, 256), st.integers(1, 32), st.integers(1, 256), st.booleans())
def test_every_shape_is_fitted_into_the_family(
    nodes: int, top_k: int, depth: int, with_law: bool
) -> None:
    shape = Shape(nodes, top_k, min(depth, nodes), with_law and top_k == 1)
    found = fitted(shape)
    assert found in SHAPES
    assert (found.top_k == 1) == (top_k == 1)
    assert found.with_law == shape.with_law


def test_chains_are_not_shorter_than_asked_and_trees_not_larger() -> None:
    for length in range(1, CHAIN_LENGTHS[-1] + 1):
        assert fitted(Shape(length, 1, length)).depth >= length
    assert fitted(Shape(100, 1, 100)).depth == CHAIN_LENGTHS[-1]
    for nodes in range(min(TREES), 200):
        assert fitted(Shape(nodes, 4, 6)).num_nodes <= nodes


def test_no_shape_is_captured_twice() -> None:
    assert len(list(family())) == len(set(family()))
