"""Rounds that last as long as a larger model's: what is asked of each shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.engine.device.brake import TargetDuration
from outrider.engine.device.graphs.shapes import AcceptanceMode, DraftKind, RoundShape

ONE = RoundShape(
    rows=1,
    nodes=1,
    draft_kind=DraftKind.NONE,
    acceptance_mode=AcceptanceMode.MATCH,
    has_features=False,
)


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (ONE, 0.004),
        (replace(ONE, nodes=6, draft_kind=DraftKind.CHAIN), 0.0041),
        (replace(ONE, rows=8, chunks=2), 0.00542),
    ],
)
def test_a_round_lasts_by_the_rows_of_its_forward(shape: RoundShape, seconds: float) -> None:
    model = TargetDuration.from_settings(round_ms=4.0, row_us=20.0)
    assert model is not None
    assert model.seconds(shape.token_rows) == pytest.approx(seconds)


def test_nothing_is_asked_where_no_duration_is_given() -> None:
    assert TargetDuration.from_settings(round_ms=0.0, row_us=20.0) is None
