"""What is known of the time that rounds on a device take."""

from __future__ import annotations

import pytest
from outrider_verifier.model_runner.gpu_runner.round_times import MeasuredRoundTimes

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS

ROUND_S = 4e-3
ROW_S = 10e-6
"""Of each row of the forward: a piece takes .32 ms."""
FAMILY = ShapeFamily(
    max_rows=8,
    max_nodes=9,
    in_process_nodes=0,
    has_features=False,
    has_sampled_acceptance=False,
    max_prefill_tokens=2048,
)
MEASURED = {shape: ROUND_S + ROW_S * shape.token_rows for shape in FAMILY.all_shapes()}


def times(*, learned: bool = True) -> MeasuredRoundTimes:
    made = MeasuredRoundTimes(FAMILY)
    if learned:
        made.set_measurements(MEASURED)
    return made


def test_without_measurements_nothing_is_known() -> None:
    unknown = times(learned=False)
    assert unknown.plain_s(4) is None and unknown.drafted_round_s(4, 5) is None


def test_a_round_takes_as_long_as_its_shape() -> None:
    known = times()
    drafted = [known.drafted_round_s(rows, nodes) for rows, nodes in ((1, 2), (8, 2), (8, 9))]
    assert None not in drafted and sorted(drafted) == drafted and len(set(drafted)) == 3
    alone, beside = known.plain_s(4), known.plain_s(4, chunks=2)
    assert alone is not None and beside == pytest.approx(alone + 2 * ROW_S * CHUNK_TOKENS)


def test_what_was_said_before_measuring_does_not_stay() -> None:
    late = times(learned=False)
    assert late.plain_s(4, chunks=64) is None
    late.set_measurements(MEASURED)
    assert late.plain_s(4, chunks=64) is not None
