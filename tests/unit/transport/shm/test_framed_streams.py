"""A stream that goes by a shared-memory channel is a stream like any other, however its lane or its
call ends."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.errors import ConnectionLostError, OutriderError
from outrider.transport.bounded_queue import MAX_BYTES
from outrider.transport.grpc import GrpcConfig, GrpcDialer, GrpcServer, verifier_services
from outrider.transport.grpc.shm_frames import ShmFrames
from outrider.transport.grpc.shm_negotiation import join_offered_channel, offer_metadata
from outrider.transport.grpc.streams import FLUSH_TIMEOUT_S, StreamFrames
from outrider.transport.heartbeat import HeartbeatConnection
from outrider.transport.shm import ShmChannel, ShmListener, make_channel_pair
from outrider.wire.limits import MAX_BUNDLE_BYTES
from outrider.wire.messages import ShmOffer
from tests.integration.fake_endpoints import FakeVerifier
from tests.waiting import until


class Call:
    """The call of a stream, which carries nothing and ends when told to."""

    def __init__(self) -> None:
        self._read: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self.frames = StreamFrames("peer", lambda: self._read, self._write)

    def end(self, error: OutriderError | None = None) -> None:
        """End it, as its peer's word or by an error."""
        if error is None:
            self._read.set_result(None)
        else:
            self._read.set_exception(error)

    @staticmethod
    async def _write(frame: bytes) -> None:
        raise AssertionError(f"a frame of {len(frame)} bytes went by the call")


class Rig:
    """A stream over a shared-memory channel, and the bare channel at both ends."""

    def __init__(self) -> None:
        self.ours, self.peer = make_channel_pair()
        self.call = Call()
        self.frames = ShmFrames(self.call.frames, self.ours)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    try:
        yield made
    finally:
        await made.frames.close()
        made.peer.close()
        assert made.ours.closed


async def told(shm_channel: ShmChannel, count: int) -> list[bytes]:
    """So many frames that have come to a bare lane."""
    found: list[bytes] = []
    async with asyncio.timeout(10.0):
        while len(found) < count:
            found += shm_channel.receive()
            await asyncio.sleep(0)
    return found


async def test_frames_of_all_sizes_cross_in_order_both_ways() -> None:
    rng = random.Random(1)
    frames = [rng.randbytes(rng.choice([0, 1, 5000, 32769, 5_000_000])) for _ in range(20)]
    async with rig() as made:
        reading = asyncio.create_task(told(made.peer, len(frames)))
        for frame in frames:
            await made.frames.send(frame)
        assert await reading == frames
        for frame in frames[:8]:
            made.peer.send(frame)
            while made.peer.num_unsent:
                made.peer.flush()
                await asyncio.sleep(0)
            assert await made.frames.receive() == frame


async def test_what_is_offered_together_crosses_together_and_is_there_without_waiting() -> None:
    async with rig() as made:
        assert made.frames.try_send(b"a", b"b", b"c")
        assert made.peer.receive() == [b"a", b"b", b"c"]
        made.peer.send(b"1", b"2", b"3")
        assert await made.frames.receive() == b"1"
        assert made.frames.receive_ready() == [b"2", b"3"]
        assert made.frames.receive_ready() == []


async def test_a_peer_that_does_not_read_makes_the_sender_wait_and_then_hears_all() -> None:
    frames = [bytes([number]) * 1_000_000 for number in range(60)]
    async with rig() as made:
        sending = asyncio.create_task(_send_all(made.frames, frames))
        await asyncio.sleep(0.05)
        assert not sending.done()
        assert not made.frames.try_send(b"more")
        assert made.ours.unsent_bytes <= MAX_BUNDLE_BYTES + len(frames[0])
        assert await told(made.peer, len(frames)) == frames
        await sending


async def _send_all(frames: ShmFrames, sent: list[bytes]) -> None:
    for frame in sent:
        await frames.send(frame)


async def test_what_nobody_takes_stays_with_its_sender() -> None:
    async with rig() as made:
        for number in range(3000):
            made.peer.send(number.to_bytes(4, "little"))
        await asyncio.sleep(0.02)
        assert made.frames.num_unread <= 128
        for number in range(3000):
            made.peer.flush()
            assert await made.frames.receive() == number.to_bytes(4, "little")


@pytest.mark.parametrize("by_call", [False, True])
async def test_what_a_peer_said_before_its_end_is_heard(by_call: bool) -> None:
    async with rig() as made:
        made.peer.send(b"last")
        if by_call:
            made.call.end()
        else:
            made.peer.close()
            asyncio.get_running_loop().call_later(0.05, made.call.end)
        assert await made.frames.receive() == b"last"
        with pytest.raises(ConnectionLostError) as lost:
            await made.frames.receive()
        # The call knows why.
        assert lost.value.reason == "PEER_CLOSED"
        with pytest.raises(ConnectionLostError):
            await made.frames.send(b"too late")
        with pytest.raises(ConnectionLostError):
            made.frames.try_send(b"too late")


async def test_a_sender_learns_of_the_end_and_loses_nothing_that_was_said() -> None:
    async with rig() as made:
        made.peer.send(b"last")
        made.peer.close()
        with pytest.raises(ConnectionLostError):
            made.frames.try_send(b"to nobody")
        assert await made.frames.receive() == b"last"


async def test_a_call_that_says_nothing_of_a_lost_lane_is_not_waited_for_long() -> None:
    async with rig() as made:
        made.peer.close()
        async with asyncio.timeout(20 * FLUSH_TIMEOUT_S):
            with pytest.raises(ConnectionLostError) as lost:
                await made.frames.receive()
        assert lost.value.reason == "SHM_CHANNEL_LOST"


async def test_a_packet_of_no_known_form_ends_the_stream_behind_what_came_before_it() -> None:
    async with rig() as made:
        made.peer.send(b"1", b"2")
        with socket.socket(fileno=os.dup(made.peer.fileno())) as bare:
            bare.send(b"\x09nonsense")
        made.peer.send(b"3")
        assert await made.frames.receive() == b"1"
        assert await made.frames.receive() == b"2"
        with pytest.raises(ConnectionLostError):
            await made.frames.receive()


async def test_what_waits_is_bounded_in_bytes() -> None:
    async with rig() as made:
        frames = [bytes([number]) * 4_000_000 for number in range(30)]
        made.peer.send(*frames)
        for _ in range(200):
            made.peer.flush()
            await asyncio.sleep(0)
        assert made.frames.unread_bytes <= 2 * MAX_BYTES
        found: list[bytes] = []
        while len(found) < len(frames):
            made.peer.flush()
            found.append(await made.frames.receive())
        assert found == frames


async def test_a_full_ring_is_looked_at_now_and_then() -> None:
    async with rig() as made:
        looks = 0
        flush = made.ours.flush

        def counted() -> None:
            nonlocal looks
            looks += 1
            flush()

        made.ours.flush = counted  # type: ignore[method-assign]
        assert made.frames.try_send(*[bytes(1_000_000)] * 20)
        assert made.ours.ring_full
        await asyncio.sleep(0.1)
        assert looks <= 120
        await told(made.peer, 20)


async def test_closing_that_is_cancelled_lets_go_all_the_same() -> None:
    async with rig() as made:
        assert made.frames.try_send(*[bytes(1_000_000)] * 20)
        closing = asyncio.create_task(made.frames.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.wait((closing,))
        assert made.ours.closed


async def test_a_frame_that_no_lane_carries_ends_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.transport.shm.channel.MAX_MESSAGE_BYTES", 1000)
    async with rig() as made:
        with pytest.raises(ConnectionLostError):
            made.frames.try_send(bytes(1001))
        with pytest.raises(ConnectionLostError):
            made.frames.try_send(b"small")


async def test_a_cancelled_receive_loses_nothing() -> None:
    async with rig() as made:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.frames.receive(), 0.01)
        made.peer.send(b"kept")
        assert await made.frames.receive() == b"kept"


async def test_closing_sends_what_is_left_first() -> None:
    frames = [bytes([number]) * 1_000_000 for number in range(18)]
    async with rig() as made:
        assert made.frames.try_send(*frames)
        assert made.ours.num_unsent
        closing = asyncio.create_task(made.frames.close())
        assert await told(made.peer, len(frames)) == frames
        await closing
        with pytest.raises(ConnectionLostError):
            await told(made.peer, 1)


async def test_aborting_ends_both_directions_at_once() -> None:
    async with rig() as made:
        made.frames.abort(ConnectionLostError("the call was cancelled", reason="PEER_LOST"))
        for failing in (made.frames.receive(), made.frames.send(b"x")):
            with pytest.raises(ConnectionLostError) as lost:
                await failing
            assert lost.value.reason == "PEER_LOST"


@pytest.mark.parametrize(
    "offer", ["", "x", "a:b", f"{'0' * 32}:{'g' * 32}", f"{'0' * 33}:{'0' * 32}", b"\xff"]
)
async def test_an_offer_that_is_none_is_no_offer(offer: str | bytes) -> None:
    assert await join_offered_channel([("outrider-shm", offer)]) is None


async def test_a_server_that_finds_no_such_listener_has_no_lane() -> None:
    assert (
        await join_offered_channel(offer_metadata(ShmOffer(name="0" * 32, token=bytes(16)))) is None
    )
    listener = ShmListener()
    try:
        stranger = ShmOffer(name=listener.make_offer().name, token=bytes(16))
        assert await join_offered_channel(offer_metadata(stranger)) is None
    finally:
        listener.close()


async def test_a_call_that_ends_while_its_lane_is_joined_leaves_nothing_open() -> None:
    listener = ShmListener()
    before = len(os.listdir("/proc/self/fd"))
    for turns in range(12):
        offer = listener.make_offer()
        joining = asyncio.create_task(join_offered_channel(offer_metadata(offer)))
        for _ in range(turns):
            await asyncio.sleep(0)
        joining.cancel()
        (shm_channel,) = await asyncio.gather(joining, return_exceptions=True)
        if isinstance(shm_channel, ShmChannel):
            shm_channel.close()
        listener.withdraw_offer(offer)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    listener.close()


async def test_listeners_that_take_in_nobody_hold_up_nobody_else() -> None:
    name = "0123456789abcdef" * 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"\0outrider-{name}")
        silent.listen(1)
        metadata = offer_metadata(ShmOffer(name=name, token=bytes(16)))
        joining = [asyncio.create_task(join_offered_channel(metadata)) for _ in range(40)]
        await asyncio.sleep(0.01)
        listener = ShmListener()
        offer = listener.make_offer()
        shm_channel = await join_offered_channel(offer_metadata(offer))
        assert shm_channel is not None
        assert any(not task.done() for task in joining)
        assert await asyncio.to_thread(lambda: 3) == 3
        assert any(not task.done() for task in joining)
        assert set(await asyncio.gather(*joining)) == {None}
        shm_channel.close()
        (await listener.wait_joined(offer)).close()
        listener.close()


async def test_an_offer_to_nobody_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    offers: list[ShmOffer] = []
    offer, withdraw = ShmListener.make_offer, ShmListener.withdraw_offer

    def make_offer(listener: ShmListener) -> ShmOffer:
        offers.append(offer(listener))
        return offers[-1]

    def withdraw_offer(listener: ShmListener, withdrawn: ShmOffer) -> None:
        offers.remove(withdrawn)
        withdraw(listener, withdrawn)

    monkeypatch.setattr(ShmListener, "make_offer", make_offer)
    monkeypatch.setattr(ShmListener, "withdraw_offer", withdraw_offer)
    monkeypatch.setattr(ShmListener, "open", ShmListener)
    dialer = GrpcDialer(GrpcConfig(shm_channels=True, connect_timeout_s=0.3))
    verifier = await dialer.verifier("127.0.0.1:1")
    with pytest.raises(OutriderError):
        await verifier.sessions()
    assert offers == []
    await dialer.close()


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("server", [False, True])
async def test_a_stream_goes_by_a_lane_where_both_ends_wish_so(client: bool, server: bool) -> None:
    serving = GrpcConfig(shm_channels=server)
    running = GrpcServer("127.0.0.1:0", verifier_services(FakeVerifier(), serving), config=serving)
    dialer = GrpcDialer(GrpcConfig(shm_channels=client))
    try:
        verifier = await dialer.verifier(await running.start())
        stream = await verifier.sessions()
        assert isinstance(stream, HeartbeatConnection)
        frames = stream.inner.frames  # type: ignore[attr-defined]
        assert isinstance(frames, ShmFrames) is (client and server)
        await stream.close()
    finally:
        await dialer.close()
        await running.stop(0.1)
