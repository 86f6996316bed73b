"""While all sessions decode plainly, one round in eight is looked at, and stands for eight."""

from __future__ import annotations

from outrider_verifier.planner.round_observer import SAMPLE_INTERVAL_ROUNDS, PlainRoundSelector


def test_every_round_is_looked_at_while_anything_is_tried() -> None:
    plain_sampler = PlainRoundSelector()
    assert [plain_sampler.weight_of_round(calm=False) for _ in range(20)] == [1] * 20
    assert plain_sampler.marks_end


def test_one_round_stands_for_those_before_it_and_its_beginning_is_noted() -> None:
    plain_sampler = PlainRoundSelector()
    seen = [
        (plain_sampler.weight_of_round(calm=True), plain_sampler.marks_end)
        for _ in range(3 * SAMPLE_INTERVAL_ROUNDS)
    ]
    cycle = [(0, False)] * (SAMPLE_INTERVAL_ROUNDS - 2) + [
        (0, True),
        (SAMPLE_INTERVAL_ROUNDS, True),
    ]
    assert seen == 3 * cycle


def test_who_begins_to_look_notes_an_end_first_and_no_round_is_forgotten() -> None:
    for calm in range(1, SAMPLE_INTERVAL_ROUNDS):
        plain_sampler = PlainRoundSelector()
        quiet = [plain_sampler.weight_of_round(calm=True) for _ in range(calm)]
        noted = plain_sampler.marks_end
        busy = [plain_sampler.weight_of_round(calm=False) for _ in range(3)]
        assert sum(quiet) == 0
        # What was between two noted ends is the only thing that is seen.
        assert busy == ([calm + 1, 1, 1] if noted else [0, calm + 2, 1])
