"""Shared-memory channels: the exchange of two processes of one host, owned by the threads that do
the rounds.

The connection that a drafter dialled stays: it shook hands, carries heartbeats and ends with its
peer. But what rounds say goes from working thread to working thread, over a Unix socket of packets
and, where a message is large, a ring of shared memory: no event loop, no other thread wakes.

channel.py                 Shared-memory channel: frames between working threads of two processes
                           on one host; and the channels of one thread.
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
