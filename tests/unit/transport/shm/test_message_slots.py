"""What others write into a shared-memory channel's memory is sent as it lies there, and stays until
it was read."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.transport.shm import MAX_INLINE_BYTES, ShmChannel
from outrider.transport.shm.ring_buffer import FRAME_HEADER_BYTES, MAX_RESERVED_BYTES, RING_BYTES
from outrider.wire.messages import EncodedMessage
from tests.fakes.shm_channels import lane_pair

SIZE = 300_000


def opened(shm_channel: ShmChannel) -> None:
    shm_channel.allow_reservations(lambda memory: True)


def place_in(shm_channel: ShmChannel, size: int = SIZE, *, fill: int = 0) -> NDArray[np.uint8]:
    place = shm_channel.reserve_frame(size)
    assert place is not None
    place[:] = fill
    return place


def framed(place: NDArray[Any], head: bytes = b"head") -> EncodedMessage:
    return EncodedMessage((head, memoryview(place).cast("B")))


def test_what_lies_in_a_place_is_sent_without_being_copied() -> None:
    with lane_pair() as (left, right):
        opened(left)
        place = place_in(left, fill=7)
        assert place.ctypes.data % 64 == 0
        left.send(framed(place[:-10]))
        (frame,) = right.receive_views()
        assert bytes(frame) == b"head" + bytes([7]) * (SIZE - 10)
        place[100] = 9
        assert frame[104] == 9


def test_frames_cross_in_the_order_of_sending_wherever_they_lie() -> None:
    rng = random.Random(3)
    with lane_pair() as (left, right):
        opened(left)
        waiting: list[tuple[NDArray[np.uint8], bytes]] = []
        sent: list[bytes] = []
        found: list[bytes] = []
        held: list[Any] = []
        placed = 0
        for _ in range(600):
            match rng.randrange(5):
                case 0:
                    place = left.reserve_frame(rng.choice([70_000, 800_000, 2_000_000]))
                    if place is not None:
                        content = rng.randbytes(len(place))
                        place[:] = np.frombuffer(content, np.uint8)
                        waiting.append((place, content))
                        placed += 1
                case 1 if waiting:
                    place, content = waiting.pop(rng.randrange(len(waiting)))
                    left.send(framed(place))
                    sent.append(b"head" + content)
                    if rng.randrange(2):
                        held.append(place)
                    del place
                case 2:
                    frame = rng.randbytes(rng.choice([10, 50_000, 1_000_000]))
                    left.send(frame)
                    sent.append(frame)
                case 3:
                    found += map(bytes, right.receive_views())
                    left.flush()
                case _:
                    held.clear()
                    if waiting and rng.randrange(4) == 0:
                        # Nothing came of it.
                        waiting.pop()
        held.clear()
        while len(found) < len(sent):
            left.flush()
            found += map(bytes, right.receive_views())
        assert found == sent
        assert placed > 50


def test_a_place_is_used_again_once_both_sides_have_let_go_of_it() -> None:
    with lane_pair() as (left, right):
        opened(left)

        def room() -> int:
            places = []
            while (place := left.reserve_frame(2_000_000)) is not None:
                places.append(place)
            return len(places)

        whole = room()
        assert whole == RING_BYTES // (2_000_000 + FRAME_HEADER_BYTES + 64)
        place = place_in(left, 2_000_000)
        view = place[5:]
        del place
        assert room() < whole
        del view
        assert room() == whole
        place = place_in(left, 2_000_000)
        left.send(framed(place))
        (frame,) = right.receive_views()
        del place
        assert room() < whole
        del frame
        assert room() == whole


@pytest.mark.parametrize("size", [10, MAX_INLINE_BYTES, MAX_RESERVED_BYTES + 1])
def test_what_is_small_or_too_large_has_no_place(size: int) -> None:
    with lane_pair() as (left, _):
        opened(left)
        assert left.reserve_frame(size) is None


def test_without_pinned_memory_there_are_no_places() -> None:
    with lane_pair() as (left, _):
        assert left.reserve_frame(SIZE) is None
        left.allow_reservations(lambda memory: False)
        assert left.reserve_frame(SIZE) is None


def test_nothing_overtakes_what_waits_for_room() -> None:
    with lane_pair() as (left, right):
        opened(left)
        place = place_in(left, fill=1)
        frames = [bytes([number]) * 3_000_000 for number in range(8)]
        left.send(*frames)
        assert left.num_unsent and left.reserve_frame(SIZE) is None
        left.send(framed(place))
        place[:] = 2
        # What is behind it waits for whoever looks at it.
        del place
        found: list[bytes] = []
        while len(found) < 9:
            found += right.receive()
            left.flush()
        assert found == [*frames, b"head" + bytes([1]) * SIZE]


def test_a_place_is_sent_once_and_copied_after_that() -> None:
    with lane_pair() as (left, right):
        opened(left)
        place = place_in(left, fill=3)
        left.send(framed(place, b"first"), framed(place, b"second"))
        place[:] = 4
        assert [bytes(frame)[-1] for frame in right.receive_views()] == [4, 3]


def test_a_head_that_finds_no_room_before_the_place_is_copied_with_it() -> None:
    with lane_pair() as (left, right):
        opened(left)
        place = place_in(left, fill=3)
        left.send(
            framed(place, bytes(FRAME_HEADER_BYTES)),
            framed(place[:100_000], bytes(FRAME_HEADER_BYTES + 1)),
        )
        found = [bytes(frame) for frame in right.receive_views()]
        assert found == [
            bytes(FRAME_HEADER_BYTES) + bytes(place),
            bytes(FRAME_HEADER_BYTES + 1) + b"\3" * 100_000,
        ]


def test_memory_stays_pinned_until_the_last_place_is_let_go_after_the_lane_closed() -> None:
    pinned: list[weakref.ref[Any]] = []

    def pin(memory: NDArray[np.uint8]) -> bool:
        assert memory.ctypes.data % 4096 == memory.nbytes % 4096 == 0
        pinned.append(weakref.ref(memory))
        return True

    with lane_pair() as (left, _):
        left.allow_reservations(pin)
        place = place_in(left, fill=5)
    assert left.reserve_frame(SIZE) is None
    gc.collect()
    assert pinned[0]() is not None and int(place.sum()) == 5 * SIZE
    del place
    gc.collect()
    assert pinned[0]() is None
