"""Slots of the device are handed out once, and padding never."""

from __future__ import annotations

import pytest

from outrider.engine.device.slots.free_slots import FreeSlots
from outrider.errors import ResourceExhaustedError


def slots(count: int) -> FreeSlots:
    return FreeSlots(count, reason="DRAFT_SLOTS_EXHAUSTED")


def test_every_slot_but_padding_is_handed_out_once() -> None:
    free = slots(4)
    assert (free.padding, free.total) == (4, 5)
    assert sorted(free.take_slot() for _ in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("count", [0, 3])
def test_when_all_are_taken_the_error_names_the_bound(count: int) -> None:
    free = slots(count)
    for _ in range(count):
        free.take_slot()
    with pytest.raises(ResourceExhaustedError, match=f"all {count} session slots") as caught:
        free.take_slot()
    assert caught.value.reason == "DRAFT_SLOTS_EXHAUSTED"


def test_a_slot_that_came_back_is_the_next_one() -> None:
    free = slots(3)
    taken = [free.take_slot() for _ in range(3)]
    free.return_slot(taken[1])
    assert free.take_slot() == taken[1]
    with pytest.raises(ResourceExhaustedError):
        free.take_slot()


@pytest.mark.parametrize("slot", [1, 2, -1])
def test_free_slots_and_padding_cannot_be_given_back(slot: int) -> None:
    free = slots(2)
    free.take_slot()
    with pytest.raises(AssertionError):
        free.return_slot(slot)
