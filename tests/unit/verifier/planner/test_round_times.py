"""What is known of the time that rounds on a device take."""

from __future__ import annotations

import pytest
from outrider_verifier.model_runner.gpu_runner.round_times import MeasuredRoundTimes

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider.engine.device.graphs.shapes import CHUNK_TOKENS, MAX_MIXED_CHUNKS, MIN_MIXED_CHUNKS

ROUND_S = 4e-3
ROW_S = 10e-6
"""Of each row of the forward: a piece takes .32 ms."""
FAMILY = ShapeFamily(
    max_rows=8, max_nodes=9, in_process_nodes=0, has_features=False, has_sampled_acceptance=False
)
MEASURED = {shape: ROUND_S + ROW_S * shape.token_rows for shape in FAMILY.all_shapes()}


def times(stretch: float, *, learned: bool = True) -> MeasuredRoundTimes:
    made = MeasuredRoundTimes(FAMILY, drafts_itself=False, max_prefill_slowdown=stretch)
    if learned:
        made.set_measurements(MEASURED)
    return made


def test_without_measurements_nothing_is_known_and_prompts_take_what_they_may() -> None:
    unknown = times(2.0, learned=False)
    assert unknown.plain_s(4, own=False) is None and unknown.drafted_round_s(4, 5) is None
    assert unknown.prompt_tokens_beside(4) == MAX_MIXED_CHUNKS * CHUNK_TOKENS


def test_a_round_takes_as_long_as_its_shape() -> None:
    known = times(2.0)
    drafted = [known.drafted_round_s(rows, nodes) for rows, nodes in ((1, 2), (8, 2), (8, 9))]
    assert None not in drafted and sorted(drafted) == drafted and len(set(drafted)) == 3
    alone, beside = known.plain_s(4, own=False), known.plain_s(4, own=False, chunks=2)
    assert alone is not None and beside == pytest.approx(alone + 2 * ROW_S * CHUNK_TOKENS)


@pytest.mark.parametrize(("stretch", "chunks"), [(1.0, 2), (1.2, 2), (1.4, 5), (9.0, 16)])
def test_prompts_may_stretch_a_round_so_far_and_take_the_fewest_pieces_in_any_case(
    stretch: float, chunks: int
) -> None:
    assert times(stretch).prompt_tokens_beside(4) == chunks * CHUNK_TOKENS


def test_crowded_prompts_take_what_there_is_room_for() -> None:
    assert times(1.0).prompt_tokens_beside(4, crowded=True) == MAX_MIXED_CHUNKS * CHUNK_TOKENS


def test_what_was_said_before_measuring_does_not_stay() -> None:
    late = times(1.0, learned=False)
    before = late.prompt_tokens_beside(4)
    late.set_measurements(MEASURED)
    assert late.prompt_tokens_beside(4) == MIN_MIXED_CHUNKS * CHUNK_TOKENS < before
