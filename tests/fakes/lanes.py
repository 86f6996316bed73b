"""Both ends of a lane, in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.transport.lane import Lane
from outrider.transport.lane.ring import Ring


@contextmanager
def _rings() -> Iterator[tuple[int, int]]:
    """Descriptors of the memory of both directions, until they are mapped."""
    there, back = Ring.make(), Ring.make()
    try:
        yield there, back
    finally:
        os.close(there)
        os.close(back)


@contextmanager
def lane_pair() -> Iterator[tuple[Lane, Lane]]:
    """Both ends of a lane."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _rings() as (there, back):
        left = Lane(ours, outgoing=Ring.of(there), incoming=Ring.of(back))
        right = Lane(theirs, outgoing=Ring.of(back), incoming=Ring.of(there))
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextmanager
def hostile_peer() -> Iterator[tuple[socket.socket, Lane]]:
    """A socket on which anything can be sent to the lane at its other end."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _rings() as (there, back):
        lane = Lane(ours, outgoing=Ring.of(there), incoming=Ring.of(back))
    try:
        with theirs:
            yield theirs, lane
    finally:
        lane.close()
