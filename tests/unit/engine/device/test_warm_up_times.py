"""Times of shapes that something else on the device made longer; shapes that are compiled first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape
from outrider.engine.device.warm_up import representative_shapes, smooth_times

FAMILY = list(
    ShapeFamily(
        max_rows=16,
        max_nodes=9,
        in_process_nodes=0,
        has_features=True,
        has_sampled_acceptance=False,
        max_prefill_tokens=2048,
    ).all_shapes()
)
TRUE = {shape: 4e-3 + 20e-6 * shape.token_rows for shape in FAMILY}
"""As they would be with the device to themselves."""
ROUND = RoundShape(
    rows=8,
    nodes=5,
    draft_kind=DraftKind.CHAIN,
    acceptance_mode=AcceptanceMode.MATCH,
    has_features=True,
)


def test_times_of_a_device_that_did_nothing_else_stay_as_they_are() -> None:
    assert smooth_times(TRUE) == pytest.approx(TRUE)


@given(delays=st.lists(st.floats(0.0, 0.05), min_size=len(FAMILY), max_size=len(FAMILY)))
def test_what_is_cleared_lies_between_the_truth_and_what_was_timed(delays: list[float]) -> None:
    timed = {shape: TRUE[shape] + delay for shape, delay in zip(FAMILY, delays, strict=True)}
    cleared = smooth_times(timed)
    assert list(cleared) != [] and set(cleared) == set(timed)
    for shape, seconds in cleared.items():
        assert TRUE[shape] <= seconds <= timed[shape]


def test_a_shape_takes_no_longer_than_one_that_contains_it() -> None:
    larger = [replace(ROUND, rows=16), replace(ROUND, nodes=6), replace(ROUND, chunks=2)]
    for other in larger:
        assert smooth_times({ROUND: 9.0, other: 5.0})[ROUND] == 5.0
    for other in (
        replace(ROUND, rows=16, nodes=4),
        replace(ROUND, draft_kind=DraftKind.TREE, nodes=8),
        replace(ROUND, acceptance_mode=AcceptanceMode.SAMPLED),
    ):
        assert smooth_times({ROUND: 9.0, other: 5.0})[ROUND] == 9.0


def test_few_shapes_represent_all_kinds_of_rounds() -> None:
    groups = representative_shapes(FAMILY)
    assert all(len({(s.draft_kind, s.acceptance_mode) for s in group}) == 1 for group in groups)
    chosen = [shape for group in groups for shape in group]
    assert len(chosen) < len(FAMILY) / 3

    def kinds(shapes: list[RoundShape]) -> set[tuple[object, ...]]:
        return {
            (s.draft_kind, s.acceptance_mode, s.has_features, s.nodes, s.rows > 0, s.chunks > 0)
            for s in shapes
        }

    assert kinds(chosen) == kinds(FAMILY)
    assert set(chosen) <= set(FAMILY)
