"""A shared-memory channel carries frames and file descriptors in order, bounds nothing by
blocking, and trusts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from outrider.errors import ConnectionLostError, InvalidMessageError, UnavailableError
from outrider.transport.shm import ShmChannelSet, ShmListener, is_ring_view, join_channel
from outrider.transport.shm.channel import MAX_PART_BYTES
from outrider.transport.shm.ring_buffer import RING_BYTES, RingBuffer
from outrider.wire.limits import MAX_MESSAGE_BYTES
from outrider.wire.messages import EncodedMessage, ShmOffer
from tests.fakes.shm_channels import hostile_peer, lane_pair


def test_frames_of_all_sizes_cross_in_order_both_ways() -> None:
    rng = random.Random(1)
    with lane_pair() as (left, right):
        for sender, receiver in ((left, right), (right, left)):
            for _ in range(40):
                sizes = [rng.choice([0, 1, 5000, 32768, 32769, 2_000_000]) for _ in range(3)]
                frames = [rng.randbytes(size) for size in sizes]
                sender.send(*frames)
                assert receiver.receive() == frames
                assert receiver.receive() == []


def test_a_peer_that_goes_without_having_read_all_is_heard_to_its_end() -> None:
    with lane_pair() as (left, right):
        right.send(b"1", b"2", b"3", b"4")
        left.send(b"never read")
        right.close()
        assert left.receive() == [b"1", b"2", b"3", b"4"]
        with pytest.raises(ConnectionLostError):
            left.receive()


def test_what_came_before_a_packet_of_no_known_form_counts_and_nothing_behind_it() -> None:
    with hostile_peer() as (peer, shm_channel):
        for packet in (b"\0first", b"\x07", b"\0second"):
            peer.send(packet)
        assert shm_channel.receive() == [b"first"]
        for _ in range(2):
            with pytest.raises(ConnectionLostError):
                shm_channel.receive()


def test_what_finds_no_room_is_kept_and_sent_later_in_order() -> None:
    rng = random.Random(2)
    frames = [rng.randbytes(rng.choice([100, 3_000_000])) for _ in range(40)]
    with lane_pair() as (left, right):
        left.send(*frames)
        assert left.num_unsent > 0
        assert left.unsent_bytes == sum(map(len, frames[-left.num_unsent :]))
        found: list[bytes] = []
        while len(found) < len(frames):
            found += right.receive()
            left.flush()
        assert found == frames
        assert left.num_unsent == left.unsent_bytes == 0


def test_a_frame_in_pieces_crosses_as_one_whether_there_is_room_or_not() -> None:
    rng = random.Random(4)
    sizes = [(), (7,), (20_000, 5000), (90_000, 1, 0, 70_000), (3_000_000,) * 2]
    with lane_pair() as (left, right):
        whole: list[bytes] = []
        for count in range(30):
            memory = [bytearray(rng.randbytes(size)) for size in sizes[count % len(sizes)]]
            whole.append(b"head" + b"".join(memory))
            left.send(EncodedMessage((b"head", *map(memoryview, memory))))
            for piece in memory:
                # The next round writes to it.
                piece[:] = bytes(len(piece))
        assert left.num_unsent > 0
        found: list[bytes] = []
        while len(found) < len(whole):
            found += right.receive()
            left.flush()
        assert found == whole
        assert left.unsent_bytes == 0


def test_what_is_borrowed_stays_as_long_as_anybody_looks_at_it() -> None:
    rng = random.Random(4)
    frames = [rng.randbytes(rng.choice([100, 40_000, 900_000])) for _ in range(300)]
    kept: list[tuple[int, bytes | memoryview]] = []
    count = borrowed = 0
    with lane_pair() as (left, right):
        left.send(*frames)
        while count < len(frames) or kept:
            found = right.receive_views()
            kept += enumerate(found, count)
            count += len(found)
            borrowed += sum(isinstance(frame, memoryview) for frame in found)
            found.clear()
            # Some are let go later than those that came behind them.
            rng.shuffle(kept)
            for _ in range(rng.randrange(8)):
                if kept:
                    number, frame = kept.pop()
                    assert bytes(frame) == frames[number]
                    del frame
            left.flush()
    assert borrowed > 50


@pytest.mark.parametrize("size", [40_000, 1_000_000, MAX_PART_BYTES])
def test_borrowing_never_takes_more_than_half_of_the_room(size: int) -> None:
    frames = [bytes([n % 256]) * size for n in range(RING_BYTES // size * 2)]
    kept: list[bytes | memoryview] = []
    with lane_pair() as (left, right):
        left.send(*frames)
        for _ in range(len(frames)):
            kept += right.receive_views()
            left.flush()
        lent = [frame for frame in kept if isinstance(frame, memoryview)]
        assert 0 < sum(map(len, lent)) <= RING_BYTES // 2
        # What is behind waits for the oldest of them, and for nothing else.
        kept = [bytes(frame) for frame in kept]
        lent.clear()
        while len(kept) < len(frames):
            left.flush()
            kept += map(bytes, right.receive_views())
        assert kept == frames
        assert left.num_unsent == 0


def test_arrays_of_a_borrowed_frame_know_it_and_outlive_the_lane() -> None:
    values = np.arange(20_000, dtype=np.int32)
    with lane_pair() as (left, right):
        left.send(values.tobytes(), values[:9].tobytes())
        large, small = right.receive_views()
    array = np.frombuffer(large[4:], np.int32).reshape(-1, 1)[1:]
    del large
    assert is_ring_view(array) and not is_ring_view(array.copy())
    assert not is_ring_view(np.frombuffer(small, np.int32)) and not array.flags.writeable
    assert array[:, 0].tolist() == values[2:].tolist()


def test_frames_are_given_back_by_many_threads_in_any_order() -> None:
    rng = random.Random(5)
    with lane_pair() as (left, right), ThreadPoolExecutor(4) as pool:
        for _ in range(40):
            frames = [rng.randbytes(200_000) for _ in range(20)]
            left.send(*frames)
            found: list[bytes | memoryview] = []
            while len(found) < len(frames):
                found += right.receive_views()
                left.flush()
            rng.shuffle(found)
            shares = [found[place::4] for place in range(4)]
            found.clear()
            assert sum(pool.map(_drop, shares)) == 20
            del shares
        left.send(b"x" * 100_000)
        assert left.num_unsent == 0


def _drop(frames: list[bytes | memoryview]) -> int:
    count = len(frames)
    while frames:
        frames.pop()
    return count


def test_a_reader_that_stopped_costs_its_sender_nothing_but_memory() -> None:
    with lane_pair() as (left, right):
        for number in range(5000):
            left.send(number.to_bytes(4, "little") * 25)
        assert left.num_unsent > 0
        while left.num_unsent > 10:
            left.drop_oldest()
        assert left.unsent_bytes == 1000
        assert right.receive()[0] == bytes(4) * 25


@pytest.mark.parametrize(
    "size", [MAX_PART_BYTES, MAX_PART_BYTES + 1, 5 * MAX_PART_BYTES, 30_000_001]
)
def test_frames_larger_than_the_ring_cross_in_parts_between_others(size: int) -> None:
    large = random.Random(size).randbytes(size)
    with lane_pair() as (left, right):
        left.send(b"before", large, b"after", large)
        found: list[bytes] = []
        while len(found) < 4:
            found += right.receive()
            left.flush()
        assert found == [b"before", large, b"after", large]
        assert left.num_unsent == left.unsent_bytes == 0


def test_a_frame_that_is_under_way_is_not_dropped() -> None:
    large = random.Random(5).randbytes(6 * MAX_PART_BYTES)
    with lane_pair() as (left, right):
        left.send(large, b"first", b"second")
        assert left.num_unsent == 3
        left.drop_oldest()
        found: list[bytes] = []
        while len(found) < 2:
            found += right.receive()
            left.flush()
        assert found == [large, b"second"]
        assert left.unsent_bytes == 0


def test_a_frame_that_is_no_message_is_refused() -> None:
    with lane_pair() as (left, right):
        with pytest.raises(InvalidMessageError):
            left.send(bytes(MAX_MESSAGE_BYTES + 1))
        left.send(b"after")
        assert right.receive() == [b"after"]


def test_the_end_comes_after_what_was_sent_before_it() -> None:
    with lane_pair() as (left, right):
        left.send(b"last words")
        left.close()
        left.close()
        assert right.receive() == [b"last words"]
        with pytest.raises(ConnectionLostError):
            right.receive()
        with pytest.raises(ConnectionLostError):
            right.send(b"to nobody")


@pytest.mark.parametrize(
    "packet",
    [
        b"\3what",
        b"\2what",
        b"\1",
        b"\1" + struct.pack("<QQ", RING_BYTES, 1),
        b"\1" + struct.pack("<QQ", 0, RING_BYTES + 1),
        b"\1" + struct.pack("<QQ", 2**64 - 1, 2**64 - 1),
        b"\1" + struct.pack("<QQ", 2**63, 2**63),
        b"\1" + struct.pack("<QQ", 0, 8) + b"more",
    ],
)
def test_packets_of_no_form_end_the_lane(packet: bytes) -> None:
    with hostile_peer() as (theirs, shm_channel):
        theirs.send(packet)
        with pytest.raises(ConnectionLostError):
            shm_channel.receive()


@pytest.mark.parametrize("then", [b"\2" + struct.pack("<QQ", 0, MAX_PART_BYTES), b"\0inline"])
def test_parts_that_never_make_a_message_end_the_lane(then: bytes) -> None:
    with hostile_peer() as (theirs, shm_channel), pytest.raises(ConnectionLostError):
        theirs.send(b"\2" + struct.pack("<QQ", 0, MAX_PART_BYTES))
        for _ in range(MAX_MESSAGE_BYTES // MAX_PART_BYTES + 1):
            theirs.send(then)
            shm_channel.receive()


def test_memory_that_its_maker_could_take_away_is_refused() -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096 + RING_BYTES)
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(short, 4096)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    for descriptor in (plain, short):
        with pytest.raises(InvalidMessageError):
            RingBuffer.from_descriptor(descriptor)
        os.close(descriptor)
    sound = RingBuffer.create_memory()
    with pytest.raises(OSError):
        os.ftruncate(sound, 0)
    os.close(sound)


async def test_who_was_offered_a_lane_joins_it_once() -> None:
    listener = ShmListener()
    try:
        offer = listener.make_offer()
        theirs = await asyncio.to_thread(join_channel, offer)
        ours = await listener.wait_joined(offer)
        ours.send(b"hello", bytes(100_000))
        assert theirs.receive() == [b"hello", bytes(100_000)]
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(join_channel, offer)
        ours.close()
        theirs.close()
    finally:
        listener.close()


async def test_a_stranger_without_the_token_gets_nothing() -> None:
    listener = ShmListener()
    try:
        offer = listener.make_offer()
        guess = ShmOffer(name=offer.name, token=secrets.token_bytes(16))
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(join_channel, guess)
        shm_channel = await asyncio.to_thread(join_channel, offer)
        shm_channel.close()
        listener.withdraw_offer(offer)
        listener.withdraw_offer(offer)
    finally:
        listener.close()


async def test_nobody_is_waited_for_longer_than_a_moment() -> None:
    listener = ShmListener()
    try:
        with pytest.raises(UnavailableError):
            await listener.wait_joined(listener.make_offer())
    finally:
        listener.close()


def test_an_offer_of_another_host_is_no_lane() -> None:
    with pytest.raises(UnavailableError):
        join_channel(ShmOffer(name=secrets.token_hex(16), token=bytes(16)))


@pytest.mark.parametrize("sends", [False, True])
def test_a_peer_that_closes_its_lane_is_no_reason_to_warn(
    sends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    shm_channels = ShmChannelSet(lost.append)
    with lane_pair() as (left, right), caplog.at_level("INFO"):
        shm_channels.attach_channel(7, left)
        readers = shm_channels.readers
        right.close()
        if sends:
            shm_channels.send_frames(7, b"to nobody")
        else:
            shm_channels.receive(readers)
    assert lost == [7]
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "shared-memory channel closed")
    ]


def test_a_peer_that_breaks_its_lane_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    shm_channels = ShmChannelSet(lambda _: None)
    with hostile_peer() as (peer, shm_channel):
        shm_channels.attach_channel(7, shm_channel)
        peer.send(b"\x07")
        shm_channels.receive(shm_channels.readers)
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "shared-memory channel lost")
    ]


def memory_with(content: bytes) -> int:
    """A descriptor of memory with this in it."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def test_a_file_descriptor_crosses_behind_the_frames_before_it() -> None:
    with lane_pair() as (left, right):
        mine = memory_with(b"shared")
        left.send(b"before")
        left.send_descriptor(mine)
        os.close(mine)
        left.send(b"behind")
        assert right.take_descriptor() is None
        assert right.receive() == [b"before", b"behind"]
        theirs = right.take_descriptor()
        assert theirs is not None
        assert os.pread(theirs, 6, 0) == b"shared"
        os.close(theirs)
        assert right.take_descriptor() is None


def held_memories() -> int:
    """Descriptors of this process that `memory_with` made, or that are copies of such."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "memfd:test" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_a_descriptor_that_nobody_takes_is_closed_with_the_channel() -> None:
    with lane_pair() as (left, right):
        mine = memory_with(b"")
        left.send_descriptor(mine)
        os.close(mine)
        assert right.receive() == []
        assert held_memories() == 1
        right.close()
        assert held_memories() == 0


@pytest.mark.parametrize("count", [2, 3, 200])
def test_descriptors_that_were_not_asked_for_end_the_channel_and_stay_nobodys(count: int) -> None:
    with hostile_peer() as (peer, shm_channel):
        mine = memory_with(b"")
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(peer, [b"\3"], [mine] * count)
        for _ in range(2):
            with pytest.raises(ConnectionLostError):
                shm_channel.receive()
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(mine)


@pytest.mark.parametrize("packet", [b"\0frame", b"\3\3", b"\1"])
def test_a_descriptor_beside_a_frame_ends_the_channel(packet: bytes) -> None:
    with hostile_peer() as (peer, shm_channel):
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(peer, [packet], [0])
        with pytest.raises(ConnectionLostError):
            shm_channel.receive()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_second_descriptor_before_the_first_was_taken_ends_the_channel() -> None:
    with hostile_peer() as (peer, shm_channel):
        socket.send_fds(peer, [b"\3"], [0])
        socket.send_fds(peer, [b"\3"], [0])
        with pytest.raises(ConnectionLostError):
            shm_channel.receive()


def test_a_descriptor_does_not_overtake_frames() -> None:
    with lane_pair() as (left, _):
        left.send(*[bytes(3_000_000)] * 40)
        assert left.num_unsent
        with pytest.raises(UnavailableError):
            left.send_descriptor(0)
