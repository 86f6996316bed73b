"""A wakeup queue wakes its owner for items and for sockets, and never loses an item."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from outrider.transport import pollable_queue as module
from outrider.transport.pollable_queue import PollableQueue


def test_items_come_in_order_and_only_once() -> None:
    box: PollableQueue[int] = PollableQueue()
    for item in range(5):
        box.put_item(item)
    assert len(box) == 5
    assert box.wait_ready(10.0) == set()
    assert box.take_all() == [0, 1, 2, 3, 4]
    assert box.take_all() == []


def test_a_wait_ends_when_its_time_is_over() -> None:
    box: PollableQueue[int] = PollableQueue()
    began = time.monotonic()
    assert box.wait_ready(0.01) == set()
    assert time.monotonic() - began >= 0.009


@pytest.mark.parametrize("most", [1024, 0])
def test_whichever_comes_first_wakes_the_owner(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "SELECT_FDS", most)
    box: PollableQueue[str] = PollableQueue()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Timer(0.05, theirs.send, (b"x",)).start()
        assert box.wait_ready(10.0, [ours.fileno()]) == {ours.fileno()}
        assert ours.recv(1) == b"x"
        threading.Timer(0.05, box.put_item, ("item",)).start()
        assert box.wait_ready(10.0, [ours.fileno()]) == set()
        assert box.take_all() == ["item"]
        assert box.wait_ready(10.0, [], [ours.fileno()]) == {ours.fileno()}


def test_no_item_is_slept_through_by_an_owner_among_many_threads() -> None:
    box: PollableQueue[int] = PollableQueue()
    count = 4 * 500

    def post(first: int) -> None:
        for item in range(first, first + 500):
            box.put_item(item)
            if item % 50 == 0:
                time.sleep(0.001)

    threads = [threading.Thread(target=post, args=(500 * place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < count:
        assert box.wait_ready(10.0) == set()
        taken = box.take_all()
        found += taken
    assert sorted(found) == list(range(count))
    for thread in threads:
        thread.join()


def test_its_descriptors_go_with_it() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    box: PollableQueue[int] = PollableQueue()
    assert descriptors() == before + 2
    del box
    assert descriptors() == before
