from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConnectionLostError, InvalidMessageError
from outrider.transport.error_codec import ErrorStatus, from_status
from outrider.transport.ray.frames import BatchReceiver, FrameBatch, Resequencer, frame_mailbox
from tests.waiting import soon


@given(st.permutations(range(12)))
def test_any_order_of_arrival_is_restored(order: list[int]) -> None:
    resequencer: Resequencer[int] = Resequencer()
    out = [item for sequence in order for item in resequencer.accept_item(sequence, sequence)]
    assert out == list(range(12))


def test_duplicates_are_dropped() -> None:
    resequencer: Resequencer[str] = Resequencer()
    assert resequencer.accept_item(1, "b") == []
    assert resequencer.accept_item(0, "a") == ["a", "b"]
    assert resequencer.accept_item(0, "again") == []
    assert resequencer.accept_item(1, "again") == []
    assert resequencer.accept_item(2, "c") == ["c"]


def test_a_gap_that_never_closes_is_an_error_not_a_leak() -> None:
    resequencer: Resequencer[int] = Resequencer()
    with pytest.raises(ConnectionLostError, match="call 0 is lost"):
        for sequence in range(1, 1000):
            resequencer.accept_item(sequence, sequence)


async def test_batches_that_overtake_each_other_are_delivered_in_order() -> None:
    mailbox = frame_mailbox()
    inlet = BatchReceiver(mailbox, 1.0)
    await inlet.accept_batch(FrameBatch(sequence=1, frames=(b"c",)))
    assert len(mailbox) == 0
    await inlet.accept_batch(FrameBatch(sequence=0, frames=(b"a", b"b")))
    assert [await mailbox.get() for _ in range(3)] == [b"a", b"b", b"c"]


async def test_the_end_comes_after_all_frames() -> None:
    mailbox = frame_mailbox()
    inlet = BatchReceiver(mailbox, 1.0)
    end = ErrorStatus(code="UNAVAILABLE", kind="ConnectionLostError", message="over")
    assert await inlet.accept_batch(FrameBatch(sequence=1, error=end)) is None
    ended = await inlet.accept_batch(FrameBatch(sequence=0, frames=(b"a",)))
    assert ended is not None and type(from_status(ended)) is ConnectionLostError
    assert await mailbox.get() == b"a"


async def test_what_is_neither_bytes_nor_a_ref_is_refused() -> None:
    inlet = BatchReceiver(frame_mailbox(), 1.0)
    hostile: object = 5
    with pytest.raises(InvalidMessageError, match="a frame must be bytes"):
        await inlet.accept_batch(FrameBatch(sequence=0, frames=(hostile,)))  # type: ignore[arg-type]


async def test_a_full_mailbox_makes_the_caller_wait() -> None:
    mailbox = frame_mailbox()
    inlet = BatchReceiver(mailbox, 1.0)
    for sequence in range(16):
        await inlet.accept_batch(FrameBatch(sequence=sequence, frames=(bytes(1 << 20),)))
    blocked = asyncio.create_task(inlet.accept_batch(FrameBatch(sequence=16, frames=(b"x",))))
    await asyncio.sleep(0.01)
    assert not blocked.done()
    await mailbox.get()
    await soon(blocked)
