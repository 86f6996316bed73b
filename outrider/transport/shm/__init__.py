"""Shared-memory channels: connections between two processes on one host, used directly by the
threads that run the rounds.

The gRPC connection that a drafter opened remains for the handshake and heartbeats, and ends when
the peer ends. Messages of the rounds go directly between the threads that run the rounds: small
ones in the packets of a Unix socket, large ones through a ring buffer in shared memory. No event
loop and no other thread has to wake up.

channel.py                 Shared-memory channel: transports frames between threads of two processes
                           on one host.
handshake.py               Handshake of a shared-memory channel: one process listens, the other
                           joins with a token.
ring_buffer.py             Ring buffer in memory shared by two processes: one writes frames, the
                           other reads them.
"""

from outrider.transport.shm.channel import (
    MAX_INLINE_BYTES,
    RING_POLL_S,
    Frame,
    ShmChannel,
    ShmChannelSet,
)
from outrider.transport.shm.handshake import (
    ShmChannelJoiner,
    ShmListener,
    is_shm_supported,
    join_channel,
    join_channel_async,
    make_channel_pair,
)
from outrider.transport.shm.ring_buffer import is_ring_view

__all__ = [
    "MAX_INLINE_BYTES",
    "RING_POLL_S",
    "Frame",
    "ShmChannelJoiner",
    "ShmChannel",
    "ShmListener",
    "ShmChannelSet",
    "is_ring_view",
    "join_channel",
    "join_channel_async",
    "make_channel_pair",
    "is_shm_supported",
]
