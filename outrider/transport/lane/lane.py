"""A lane: frames from one working thread to another, of two processes on one host."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from typing import Final

from outrider.errors import ConnectionLostError, InvalidMessageError, OutriderError
from outrider.transport.lane.ring import RING_BYTES, Ring

MAX_FRAME_BYTES: Final = RING_BYTES // 2
"""Of a frame; of larger ones a ring that is not empty might never have room."""
_INLINE_BYTES: Final = 32 << 10
"""Frames up to this size cross in the packet itself."""
_INLINE, _IN_RING = b"\0", b"\1"
_PLACE: Final = struct.Struct("<QQ")
"""Offset and size of a frame in the ring."""
_MOST_READ: Final = 256
"""Frames taken at once: a peer that never stops must not keep its reader from all else."""


class Lane:
    """One end. Used by one thread at a time; nothing blocks."""

    def __init__(self, connected: socket.socket, outgoing: Ring, incoming: Ring) -> None:
        """`connected` keeps packets apart (SOCK_SEQPACKET)."""
        connected.setblocking(False)
        self._socket = connected
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent: deque[bytes] = deque()
        self.unsent_bytes = 0
        """Size of the frames that did not find room yet; their sender bounds it."""
        self.closed = False

    def fileno(self) -> int:
        """What to wait for: readable when frames, or the end, are there."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Frames that did not find room yet; `flush` tries again."""
        return len(self._unsent)

    def send(self, *frames: bytes) -> None:
        """Hand frames over, in order, or keep them until there is room. Raises ConnectionLostError
        when the peer is gone, InvalidMessageError for a frame that no lane carries."""
        for frame in frames:
            if len(frame) > MAX_FRAME_BYTES:
                raise InvalidMessageError(
                    f"a frame of {len(frame)} bytes, a lane carries {MAX_FRAME_BYTES}",
                    reason="LANE_FRAME",
                )
        self._unsent.extend(frames)
        self.unsent_bytes += sum(map(len, frames))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for by now. Raises ConnectionLostError."""
        while self._unsent:
            frame = self._unsent[0]
            if not self._sent(frame):
                return
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Forget the frame that has been unsent for longest."""
        self.unsent_bytes -= len(self._unsent.popleft())

    def receive(self) -> list[bytes]:
        """The frames that have arrived. Raises ConnectionLostError at the end, and for a peer that
        does not keep to the form of packets; the frames before it are lost with it."""
        frames: list[bytes] = []
        while len(frames) < _MOST_READ:
            try:
                packet = self._socket.recv(_INLINE_BYTES + 1)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise _lost(str(error)) from None
            if not packet:
                # What came before the end counts; the end is still there for the next call.
                if frames:
                    break
                raise _lost("the peer closed it")
            frames.append(self._frame(packet))
        return frames

    def close(self) -> None:
        """Close this end; idempotent. The peer is told."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()
        self._unsent.clear()
        self._outgoing.close()
        self._incoming.close()

    def _sent(self, frame: bytes) -> bool:
        """Whether there was room for the frame."""
        packet = _INLINE + frame
        if len(frame) > _INLINE_BYTES:
            offset = self._outgoing.write(frame)
            if offset is None:
                return False
            packet = _IN_RING + _PLACE.pack(offset, len(frame))
        try:
            self._socket.send(packet)
        except (BlockingIOError, InterruptedError):
            if len(frame) > _INLINE_BYTES:
                self._outgoing.take_back()
            return False
        except OSError as error:
            raise _lost(str(error)) from None
        return True

    def _frame(self, packet: bytes) -> bytes:
        if packet[:1] == _INLINE:
            return packet[1:]
        if packet[:1] != _IN_RING or len(packet) != 1 + _PLACE.size:
            raise _lost("a packet of no known form")
        offset, size = _PLACE.unpack_from(packet, 1)
        try:
            return self._incoming.read(offset, size)
        except OutriderError as error:
            raise _lost(error.message) from None


def _lost(why: str) -> ConnectionLostError:
    return ConnectionLostError(f"the lane is lost: {why}", reason="LANE_LOST")
