"""While all sessions decode plainly, one round in eight is looked at, and stands for eight."""

from __future__ import annotations

from outrider_verifier.planner.glances import EVERY, Glances


def test_every_round_is_looked_at_while_anything_is_tried() -> None:
    glances = Glances()
    assert [glances.stands_for(calm=False) for _ in range(20)] == [1] * 20
    assert glances.notes


def test_one_round_stands_for_those_before_it_and_its_beginning_is_noted() -> None:
    glances = Glances()
    seen = [(glances.stands_for(calm=True), glances.notes) for _ in range(3 * EVERY)]
    cycle = [(0, False)] * (EVERY - 2) + [(0, True), (EVERY, True)]
    assert seen == 3 * cycle


def test_who_begins_to_look_notes_an_end_first_and_no_round_is_forgotten() -> None:
    for calm in range(1, EVERY):
        glances = Glances()
        quiet = [glances.stands_for(calm=True) for _ in range(calm)]
        noted = glances.notes
        busy = [glances.stands_for(calm=False) for _ in range(3)]
        assert sum(quiet) == 0
        # What was between two noted ends is the only thing that is seen.
        assert busy == ([calm + 1, 1, 1] if noted else [0, calm + 2, 1])
