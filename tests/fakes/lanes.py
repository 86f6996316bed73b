"""Both ends of a lane, in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.transport.lane import Lane
from outrider.transport.lane.ring import Ring


@contextmanager
def lane_pair() -> Iterator[tuple[Lane, Lane]]:
    """Both ends of a lane."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there, back = Ring.make(), Ring.make()
    left = Lane(ours, outgoing=Ring.of(there), incoming=Ring.of(back))
    right = Lane(theirs, outgoing=Ring.of(back), incoming=Ring.of(there))
    os.close(there)
    os.close(back)
    try:
        yield left, right
    finally:
        left.close()
        right.close()
