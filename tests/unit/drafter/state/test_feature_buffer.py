"""Features are read where they lie, each once, and messages that were used up are let go."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from outrider_drafter.state.feature_buffer import FeatureBuffer

from outrider.wire.messages import TensorDtype, WireTensor
from tests.fakes.shm_channels import lane_pair

SESSIONS, WIDTH, MOST = 3, 2, 4


def feature(slot: int, position: int) -> list[float]:
    """What tells every row apart."""
    return [float(slot), float(position)]


class Scripted:
    """Held features beside what they should be."""

    def __init__(self) -> None:
        self.held = FeatureBuffer(
            max_sessions=SESSIONS, width=WIDTH, convert=lambda wire: wire.data
        )
        self.ends = [0] * SESSIONS
        self.used = [0] * SESSIONS
        for slot in range(SESSIONS):
            self.held.open_slot(slot)

    def tell(self, counts: list[int]) -> None:
        """One message with counts[s] new rows of each session."""
        rows = [
            feature(slot, self.ends[slot] + place)
            for slot, count in enumerate(counts)
            for place in range(count)
        ]
        self.take_in(np.array(rows, dtype=np.float32).reshape(len(rows), WIDTH), counts)

    def take_in(self, data: NDArray[np.float32], counts: list[int]) -> None:
        """Rows of a message, counts[s] of each session in turn."""
        sizes = np.array(counts)
        self.held.add_rows(
            WireTensor(dtype=TensorDtype.FLOAT32, data=data),
            np.arange(SESSIONS),
            np.array(self.ends),
            sizes,
            np.cumsum(sizes) - sizes,
        )
        self.ends = [end + count for end, count in zip(self.ends, counts, strict=True)]


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(st.integers(0, MOST), min_size=SESSIONS, max_size=SESSIONS)
        | st.sampled_from(["read", "batch", "some", "again"]),
        max_size=20,
    )
)
def test_every_row_is_read_at_its_place(steps: list[list[int] | str]) -> None:
    script = Scripted()
    held = script.held
    for step in steps:
        if isinstance(step, list):
            script.tell(step)
            continue
        slots = [s for s in range(SESSIONS) if script.ends[s] > script.used[s]]
        if step == "again":
            slots = [s for s in range(SESSIONS) if script.used[s]]
        elif step == "some":
            slots = slots[1:]
        starts = [script.used[s] - (step == "again") for s in slots]
        stops = [min(script.ends[s], start + MOST) for s, start in zip(slots, starts, strict=True)]
        if step == "read":
            for slot, start, stop in zip(slots, starts, stops, strict=True):
                rows = held.read_rows(slot, start, stop)
                assert rows.tolist() == [feature(slot, p) for p in range(start, stop)]
                held.mark_consumed(slot, stop, rows[-1])
        elif slots:
            counts = np.array(stops) - np.array(starts)
            out = np.full((len(slots), MOST, WIDTH), -1, dtype=np.float32)
            held.copy_rows(np.array(slots), np.array(starts), counts, out)
            for index, (slot, start, stop) in enumerate(zip(slots, starts, stops, strict=True)):
                found = out[index, : stop - start].tolist()
                assert found == [feature(slot, p) for p in range(start, stop)]
                spare = out[index, stop - start :].tolist()
                assert all(row == [-1.0, -1.0] or row[0] == slot for row in spare)
            newest = out[np.arange(len(slots)), counts - 1]
            held.mark_batch_consumed(np.array(slots), np.array(stops), newest)
        for slot, stop in zip(slots, stops, strict=True):
            script.used[slot] = stop
    assert len(held) == 0 or script.used != script.ends
    if script.used == script.ends:
        assert len(held) == 0


def test_a_message_is_let_go_when_its_last_session_needs_it_no_more() -> None:
    script = Scripted()
    script.tell([2, 0, 1])
    rows = script.held.read_rows(0, 0, 2)
    script.held.mark_consumed(0, 2, rows[-1])
    assert len(script.held) == 1
    script.held.drop_slot(2)
    assert len(script.held) == 0
    script.tell([0, 0, 3])
    assert len(script.held) == 0, "nobody reads them"


def test_what_lies_in_a_lane_is_copied_if_it_is_not_used_until_the_next_message() -> None:
    scripted = Scripted()
    with lane_pair() as (left, right):
        for _ in range(3):
            data = np.zeros((SESSIONS * 8_000, WIDTH), np.float32)
            left.send(data.tobytes())
            (frame,) = right.receive_views()
            rows = np.frombuffer(frame, np.float32).reshape(-1, WIDTH)
            scripted.take_in(rows, [8_000] * SESSIONS)
            del frame, rows
        slots, counts = np.arange(SESSIONS), np.full(SESSIONS, 8_000)
        views = [scripted.held.find_view(slots, counts * number, counts) for number in range(3)]
        assert [view is not None for view in views] == [False, False, True]
        del views


def test_a_device_may_read_some_sessions_rows_where_others_lie_too() -> None:
    scripted = Scripted()
    with lane_pair() as (left, right):
        counts, rows = [8_000, 4_000, 6_000], []
        for slot, count in enumerate(counts):
            rows += [feature(slot, position) for position in range(count)]
        left.send(np.array(rows, np.float32).tobytes())
        (frame,) = right.receive_views()
        scripted.take_in(np.frombuffer(frame, np.float32).reshape(-1, WIDTH), counts)
        held, starts = scripted.held, np.zeros(2, dtype=np.int64)
        lying = held.find_view(np.array([0, 2]), starts, np.array([8_000, 6_000]))
        assert lying is not None and lying.offsets.tolist() == [0, 12_000]
        assert lying.rows[12_000].tolist() == feature(2, 0)
        assert held.find_view(np.array([0, 2]), starts, np.array([8_000, 5_999])) is None
        assert held.find_view(np.array([1, 2]), starts + 1, np.array([3_999, 5_999])) is None
        held.drop_slot(1)
        assert held.find_view(np.array([0, 1]), starts, np.array([8_000, 4_000])) is None
        assert held.find_view(np.array([2]), starts[:1], np.array([6_000])) is not None
        del frame, lying
        # What another message brings, which nobody lent, is no reason to look elsewhere.
        held.open_slot(1)
        scripted.ends[1] = 0
        scripted.tell([0, 3, 0])
        assert held.find_view(np.array([2]), starts[:1], np.array([6_000])) is None, "it was copied"
        assert held.find_view(np.array([1]), starts[:1], np.array([3])) is None, "it was not lent"
        out = np.zeros((1, 3, WIDTH), np.float32)
        held.copy_rows(np.array([1]), starts[:1], np.array([3]), out)
        assert out[0].tolist() == [feature(1, position) for position in range(3)]


def test_what_is_copied_out_of_a_lane_is_what_somebody_waits_for() -> None:
    scripted = Scripted()
    gap, rows = 3, 20_000
    with lane_pair() as (left, right):
        memory = np.zeros((SESSIONS * (rows + gap), WIDTH), np.float32)
        offsets = np.arange(SESSIONS) * (rows + gap)
        for number in range(SESSIONS):
            memory[offsets[number] : offsets[number] + rows] = number
        left.send(memory.tobytes())
        (frame,) = right.receive_views()
        lying = np.frombuffer(frame, np.float32).reshape(-1, WIDTH)
        counts = np.full(SESSIONS, rows)
        slots, firsts = np.arange(SESSIONS), np.zeros(SESSIONS, dtype=np.int64)
        wire = WireTensor(dtype=TensorDtype.FLOAT32, data=lying)
        scripted.held.add_rows(wire, slots, firsts, counts, offsets)
        assert scripted.held.find_view(slots, firsts, counts) is not None
        another = WireTensor(dtype=TensorDtype.FLOAT32, data=np.zeros((1, WIDTH), np.float32))
        one = np.ones(1, dtype=np.int64)
        scripted.held.add_rows(another, 0 * one, rows * one, one, 0 * one)
        assert scripted.held.find_view(slots, firsts, counts) is None
        for number in range(SESSIONS):
            copied = scripted.held.read_rows(number, 0, rows)
            assert (copied == number).all()
            assert copied.base is not None and len(copied.base) == SESSIONS * rows
