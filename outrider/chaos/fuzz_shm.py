"""Shared-memory channel fuzzer: malformed packets, some with positions outside the ring."""

from __future__ import annotations

import os
import random
import socket
import struct
import time

from outrider.chaos.fuzz import MAX_DECODE_S, FuzzReport
from outrider.errors import ConnectionLostError
from outrider.transport.shm.channel import ShmChannel
from outrider.transport.shm.ring_buffer import RING_BYTES, RingBuffer
from outrider.wire.codec import decode_drafter_messages

PORT = "shm"
_PACKETS = 8
"""Number of packets that are sent before the shared-memory channel reads them."""
_PLACES = (0, 1, 4096, RING_BYTES - 1, RING_BYTES, RING_BYTES + 1, 2**31, 2**63, 2**64 - 1)
_MAX_BYTES = 512


def fuzz_shm_channel(frames: int, *, seed: int) -> FuzzReport:
    """Send `frames` malformed packets to shared-memory channels and return the results.

    A channel that breaks is replaced by a new one.
    """
    report, rng = FuzzReport(), random.Random(seed)
    ring, other = _ring(), _ring()
    left = frames
    while left > 0:
        ours, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, peer:
            peer.setblocking(False)
            shm_channel = ShmChannel(ours, other, ring)
            while left > 0:
                packets = [_packet(rng) for _ in range(min(left, _PACKETS))]
                left -= len(packets)
                if not _receives(shm_channel, peer, packets, report):
                    break
    report.frames[PORT] += frames
    ring.close()
    other.close()
    return report


def _receives(
    shm_channel: ShmChannel, peer: socket.socket, packets: list[bytes], report: FuzzReport
) -> bool:
    """Return whether the shared-memory channel survives these packets without an unexpected
    error."""
    began = time.thread_time()
    try:
        for packet in packets:
            peer.send(packet)
        for frame in shm_channel.receive():
            report.accepted[PORT] += 1
            decode_drafter_messages(frame)
        return True
    except ConnectionLostError:
        return False
    except Exception as error:
        sent = " ".join(packet.hex() for packet in packets)
        report.failures.append(f"{PORT}: {type(error).__name__}: {error}: {sent}")
        return False
    finally:
        took = time.thread_time() - began
        report.slowest_s = max(report.slowest_s, took)
        if took > MAX_DECODE_S:
            report.failures.append(f"{PORT}: {took:.2f} s for {len(packets)} packets")


def _packet(rng: random.Random) -> bytes:
    """Return a packet, mostly of a valid form, because a channel ends at the first invalid form."""
    form = rng.random()
    if form < 0.85:
        return b"\0" + rng.randbytes(rng.randrange(_MAX_BYTES))
    if form < 0.97:
        offset, size = rng.choice(_PLACES[:3]), rng.choice((0, 1, 100, 4096))
    else:
        offset, size = rng.choice(_PLACES), rng.choice(_PLACES)
    kind = b"\2" if form > 0.95 else b"\1"
    packet = kind + struct.pack("<QQ", offset, size)
    return packet if form < 0.99 else packet + rng.randbytes(rng.randrange(3))


def _ring() -> RingBuffer:
    descriptor = RingBuffer.create_memory()
    try:
        return RingBuffer.from_descriptor(descriptor)
    finally:
        os.close(descriptor)
