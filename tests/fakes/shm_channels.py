"""Both ends of a shared-memory channel, in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.transport import shm
from outrider.transport.shm import ShmChannel
from outrider.transport.shm.ring_buffer import RingBuffer


@contextmanager
def lane_pair() -> Iterator[tuple[ShmChannel, ShmChannel]]:
    """Both ends of a shared-memory channel."""
    left, right = shm.make_channel_pair()
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextmanager
def hostile_peer() -> Iterator[tuple[socket.socket, ShmChannel]]:
    """A socket on which anything can be sent to the shared-memory channel at its other end."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there, back = RingBuffer.create_memory(), RingBuffer.create_memory()
    attacked = ShmChannel(
        ours, outgoing=RingBuffer.from_descriptor(there), incoming=RingBuffer.from_descriptor(back)
    )
    os.close(there)
    os.close(back)
    try:
        with theirs:
            yield theirs, attacked
    finally:
        attacked.close()
