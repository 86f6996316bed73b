"""The shape of drafts follows the load and the text, and changes seldom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from outrider.speculation.draft_shape_controller import (
    MIN_ROUNDS,
    DraftShapeController,
    DraftShapeTimes,
)

CHAIN, TREE = 5, 17
DEVICE_MS = {1: (4.6, 5.2), 8: (5.2, 6.1), 16: (5.6, 7.4), 32: (6.7, 12.0)}
"""Milliseconds of a round with chains and with trees at a load, as an 8B model on an H200 takes."""


def shapes_at(load: int) -> list[DraftShapeTimes]:
    chain, tree = DEVICE_MS[load]
    both = [DraftShapeTimes(CHAIN, False, chain / 1e3), DraftShapeTimes(TREE, True, tree / 1e3)]
    return both if load <= 16 else both[:1]


def serve(
    controller: DraftShapeController,
    loads: Sequence[int],
    tokens: dict[int, float],
    seed: int = 0,
) -> tuple[float, list[int]]:
    """Tokens per second over rounds at these loads, and the shape of each; a row emits so many
    tokens in the mean. A change of the shape costs a round's drafts."""
    draws = random.Random(seed)
    seconds, emitted, used, before = 0.0, 0, [], 0
    for load in loads:
        shapes = shapes_at(load)
        nodes = controller.choose_shape(shapes, 2e-4)
        (took,) = [shape.seconds for shape in shapes if shape.num_nodes == nodes]
        seconds += took + 2e-4
        used.append(nodes)
        if nodes != before:
            before = nodes
            emitted += load
            continue
        counts = [min(nodes, max(1, round(draws.gauss(tokens[nodes], 1.2)))) for _ in range(load)]
        emitted += sum(counts)
        controller.observe_round(nodes, load, sum(counts), sum(n * n for n in counts))
    return emitted / seconds, used


def best_rate(load: int, tokens: dict[int, float]) -> float:
    """Tokens per second of the better shape, without rounding of the tokens."""
    return max(load * tokens[shape.num_nodes] / (shape.seconds + 2e-4) for shape in shapes_at(load))


@pytest.mark.parametrize("load", [1, 8, 16, 32])
@pytest.mark.parametrize("tokens", [{CHAIN: 3.2, TREE: 4.3}, {CHAIN: 2.7, TREE: 2.9}])
def test_the_faster_shape_is_in_force_at_each_load(load: int, tokens: dict[int, float]) -> None:
    rate, used = serve(DraftShapeController(), [load] * 4000, tokens)
    assert rate > 0.96 * best_rate(load, tokens)
    changes = sum(a != b for a, b in pairwise(used))
    assert changes <= 8


def test_a_shape_that_a_load_rules_out_is_left_at_once() -> None:
    controller = DraftShapeController()
    tokens = {CHAIN: 3.2, TREE: 4.3}
    _, used = serve(controller, [8] * 200, tokens)
    assert used[-1] == TREE
    _, used = serve(controller, [32], tokens)
    assert used == [CHAIN]
    _, used = serve(controller, [8] * 200, tokens)
    assert used[-1] == TREE


def test_the_text_decides_where_times_are_near() -> None:
    controller = DraftShapeController()
    _, used = serve(controller, [8] * 1000, {CHAIN: 3.2, TREE: 4.4})
    assert used[-1] == TREE
    _, used = serve(controller, [8] * 4000, {CHAIN: 3.2, TREE: 3.3}, seed=1)
    assert used[-1] == CHAIN


def test_nothing_changes_before_enough_was_seen() -> None:
    controller = DraftShapeController()
    _, used = serve(controller, [1] * int(MIN_ROUNDS), {CHAIN: 3.2, TREE: 4.3})
    assert set(used) == {CHAIN}


def test_without_shapes_there_is_no_choice() -> None:
    assert DraftShapeController().choose_shape([], 0.0) == 0
