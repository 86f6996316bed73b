"""A slow link holds everything for its time, keeps the order, and ends with its ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from outrider_bench.hooks.relay import Relay, RelayDirection, TcpEndpoint, handle_command

from outrider.errors import ConnectionLostError
from outrider.transport.shm import ShmChannel
from tests.fakes.shm_channels import lane_pair

DELAY_S = 0.004


class FakeEnd:
    """An end whose peer is a test."""

    def __init__(self) -> None:
        self.coming: list[bytes] = []
        self.sent: list[bytes] = []
        self.room = True
        self.ended = False
        self.kept: list[bytes] = []

    def fileno(self) -> int:
        return 0

    @property
    def num_unsent(self) -> int:
        return len(self.kept)

    def send(self, *frames: bytes) -> None:
        self.kept += frames
        self.flush()

    def flush(self) -> None:
        if self.room:
            self.sent, self.kept = self.sent + self.kept, []

    def receive(self) -> list[bytes]:
        coming, self.coming = self.coming, []
        if not coming and self.ended:
            raise ConnectionLostError("over", reason="PEER_CLOSED")
        return coming

    def close(self) -> None:
        """Nothing to do."""


def test_what_came_together_leaves_together_in_order_and_not_before_its_time() -> None:
    source, sink = FakeEnd(), FakeEnd()
    direction = RelayDirection(source, sink, 1.0)
    assert direction.due is None
    source.coming = [b"a", b"b"]
    direction.take_in(10.0)
    source.coming = [b"c"]
    direction.take_in(10.5)
    assert direction.due == 11.0
    direction.deliver_due(10.999)
    assert sink.sent == []
    direction.deliver_due(11.0)
    assert sink.sent == [b"a", b"b"]
    direction.deliver_due(11.5)
    assert sink.sent == [b"a", b"b", b"c"]


def test_the_end_is_held_too_and_comes_after_all_that_was_said() -> None:
    source, sink = FakeEnd(), FakeEnd()
    direction = RelayDirection(source, sink, 1.0)
    source.coming, source.ended = [b"last"], True
    direction.take_in(1.0)
    direction.take_in(1.5)
    assert not direction.reads and not direction.over(2.0)
    sink.room = False
    direction.deliver_due(2.5)
    assert not direction.over(2.5)
    sink.room = True
    direction.deliver_due(2.6)
    assert sink.sent == [b"last"] and direction.over(2.6)


def test_a_source_is_read_no_further_while_too_much_of_it_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider_bench.hooks.relay._MAX_HELD", 3)
    source, sink = FakeEnd(), FakeEnd()
    direction = RelayDirection(source, sink, 1.0)
    source.coming = [b"abc"]
    direction.take_in(0.0)
    assert not direction.reads
    direction.deliver_due(1.0)
    assert direction.reads


@contextmanager
def at_work(relay: Relay) -> Iterator[None]:
    """Let a thread drive a relay whose links stand; it is closed at the end."""
    bell, ring = os.pipe()

    def work() -> None:
        while not relay.step(bell):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        os.write(ring, b"x")
        thread.join(10.0)
        relay.close()
        os.close(bell)
        os.close(ring)


@contextmanager
def streams(delay_s: float = DELAY_S) -> Iterator[tuple[Relay, socket.socket, socket.socket]]:
    """A relay at work, and both outer ends of its one link of sockets."""
    relay = Relay(delay_s)
    one, near = socket.socketpair()
    far, other = socket.socketpair()
    relay.join(TcpEndpoint(near), TcpEndpoint(far))
    with one, other:
        one.settimeout(10.0)
        other.settimeout(10.0)
        with at_work(relay):
            yield relay, one, other


@contextmanager
def lanes() -> Iterator[tuple[ShmChannel, ShmChannel]]:
    """Both outer ends of a link of lanes, whose relay is at work."""
    relay = Relay(DELAY_S)
    with lane_pair() as (one, near), lane_pair() as (far, other):
        relay.join(near, far)
        with at_work(relay):
            yield one, other


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, without a pause: delays are measured here."""
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end


def heard(shm_channel: ShmChannel, count: int) -> list[bytes]:
    """The next frames of a lane."""
    frames: list[bytes] = []

    def listen() -> bool:
        frames.extend(shm_channel.receive())
        return len(frames) >= count

    until(listen)
    return frames


def test_a_link_of_sockets_holds_both_ways() -> None:
    with streams() as (_, one, other):
        for caller, called in ((one, other), (other, one)):
            began = time.monotonic()
            caller.sendall(b"hello")
            assert called.recv(16) == b"hello"
            assert time.monotonic() - began >= DELAY_S


def test_a_link_carries_more_than_a_socket_does() -> None:
    much = bytes(range(256)) * 8192
    with streams() as (_, one, other):
        sender = threading.Thread(target=one.sendall, args=(much,))
        sender.start()
        time.sleep(0.05)  # Longer than the delay: all that finds room lies in the sockets.
        found = b""
        while len(found) < len(much):
            found += other.recv(1 << 16)
        sender.join()
        assert found == much


def test_an_end_that_closes_takes_the_link_along_once_all_has_arrived() -> None:
    with streams() as (relay, one, other):
        one.sendall(b"goodbye")
        one.close()
        assert other.recv(16) == b"goodbye"
        assert other.recv(16) == b""
        until(lambda: relay.links == 0)


def test_nobody_there_to_take_it_ends_the_link() -> None:
    with streams(0.05) as (relay, one, other):
        one.sendall(b"x")
        other.close()
        assert one.recv(16) == b""
        until(lambda: relay.links == 0)


def test_lanes_are_carried_with_frames_of_any_size() -> None:
    frames = [b"small", bytes(200_000), b"", b"after"]
    with lanes() as (one, other):
        began = time.monotonic()
        one.send(*frames)
        other.send(b"back")
        assert heard(other, 4) == frames
        assert heard(one, 1) == [b"back"]
        assert time.monotonic() - began >= DELAY_S
        other.close()
        with pytest.raises(ConnectionLostError):
            heard(one, 1)


def test_a_delay_is_kept_to_a_fraction_of_a_millisecond() -> None:
    late = [1.0]
    with lanes() as (one, other):
        # The best of many: what a machine that does other things adds is not the relay's.
        while min(late) >= 0.001 and len(late) < 300:
            began = time.monotonic()
            one.send(b"tick")
            heard(other, 1)
            late.append(time.monotonic() - began - DELAY_S)
    assert 0.0 <= min(late) < 0.001


def test_commands_open_links_and_what_cannot_be_done_is_said() -> None:
    relay, said = Relay(0.0), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        handle_command(relay, f"dial 127.0.0.1:{server.getsockname()[1]}", said.append)
        host, _, port = said.pop().partition(":")
        with at_work(relay), socket.create_connection((host, int(port)), 10.0) as caller:
            until(lambda: relay.links == 1)
            server.accept()[0].close()
            assert caller.recv(1) == b""
    for command in ("dial nowhere", "shm x zz", "shm x 00ff", "dial", "hang up"):
        handle_command(relay, command, said.append)
    assert len(said) == 5 and all(line.startswith("error ") for line in said)
