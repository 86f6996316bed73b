"""Both ends of a lane, in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.transport import shm
from outrider.transport.shm import Lane
from outrider.transport.shm.ring_buffer import Ring


@contextmanager
def lane_pair() -> Iterator[tuple[Lane, Lane]]:
    """Both ends of a lane."""
    left, right = shm.lane_pair()
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextmanager
def hostile_peer() -> Iterator[tuple[socket.socket, Lane]]:
    """A socket on which anything can be sent to the lane at its other end."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there, back = Ring.make(), Ring.make()
    attacked = Lane(ours, outgoing=Ring.of(there), incoming=Ring.of(back))
    os.close(there)
    os.close(back)
    try:
        with theirs:
            yield theirs, attacked
    finally:
        attacked.close()
