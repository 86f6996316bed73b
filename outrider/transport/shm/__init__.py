"""Lanes: the exchange of two processes of one host, owned by the threads that do the rounds.

The connection that a drafter dialled stays: it shook hands, carries heartbeats and ends with its
peer. But what rounds say goes from working thread to working thread, over a Unix socket of packets
and, where a message is large, a ring of shared memory: no event loop, no other thread wakes.
"""

from outrider.transport.shm.channel import INLINE_BYTES, RING_LOOK_S, Frame, Lane
from outrider.transport.shm.channel_set import LaneSet
from outrider.transport.shm.handshake import (
    JoinLane,
    LaneListener,
    join_lane,
    join_lane_soon,
    lane_pair,
    lanes_exist,
)
from outrider.transport.shm.ring_buffer import is_lent

__all__ = [
    "INLINE_BYTES",
    "RING_LOOK_S",
    "Frame",
    "JoinLane",
    "Lane",
    "LaneListener",
    "LaneSet",
    "is_lent",
    "join_lane",
    "join_lane_soon",
    "lane_pair",
    "lanes_exist",
]
