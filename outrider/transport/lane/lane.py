"""A lane: frames from one working thread to another, of two processes on one host."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from typing import Final

from outrider.errors import ConnectionLostError, InvalidMessageError, OutriderError
from outrider.transport.lane.ring import RING_BYTES, Ring
from outrider.wire.limits import MAX_MESSAGE_BYTES

PART_BYTES: Final = RING_BYTES // 4
"""Larger frames cross in parts of this size: for these a ring has room again and again."""
_INLINE_BYTES: Final = 32 << 10
"""Frames up to this size cross in the packet itself."""
_INLINE, _IN_RING, _GOES_ON = b"\0", b"\1", b"\2"
"""A frame in the packet; a frame or its last part in the ring; a part that is not the last."""
_PLACE: Final = struct.Struct("<QQ")
"""Offset and size of a frame in the ring."""
_MOST_READ: Final = 64
"""Packets taken at once: a peer that never stops must not keep its reader from all else."""


class Lane:
    """One end. Used by one thread at a time; nothing blocks."""

    def __init__(self, connected: socket.socket, outgoing: Ring, incoming: Ring) -> None:
        """`connected` keeps packets apart (SOCK_SEQPACKET)."""
        connected.setblocking(False)
        self._socket = connected
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent: deque[bytes] = deque()
        self._begun = 0
        """Bytes of the first of these that have left in parts."""
        self._parts: list[bytes] = []
        """Of a frame that is not here as a whole yet."""
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
            if len(frame) > MAX_MESSAGE_BYTES:
                raise InvalidMessageError(
                    f"a frame of {len(frame)} bytes, a lane carries {MAX_MESSAGE_BYTES}",
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
            if self._begun >= len(frame):
                self._begun = 0
                self.unsent_bytes -= len(self._unsent.popleft())

    def drop_oldest(self) -> None:
        """Forget the frame that has been unsent for longest, but for one that is under way."""
        place = int(self._begun > 0)
        if place < len(self._unsent):
            self.unsent_bytes -= len(self._unsent[place])
            del self._unsent[place]

    def receive(self) -> list[bytes]:
        """The frames that have arrived. Raises ConnectionLostError at the end, and for a peer that
        does not keep to the form of packets; the frames before it are lost with it."""
        frames: list[bytes] = []
        for _ in range(_MOST_READ):
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
            frame = self._frame(packet)
            if frame is not None:
                frames.append(frame)
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
        """Whether there was room for the frame, or its next part."""
        packet, size = _INLINE + frame, len(frame)
        if len(frame) > _INLINE_BYTES:
            part = memoryview(frame)[self._begun : self._begun + PART_BYTES]
            offset, size = self._outgoing.write(part), len(part)
            if offset is None:
                return False
            last = self._begun + size == len(frame)
            packet = (_IN_RING if last else _GOES_ON) + _PLACE.pack(offset, size)
        try:
            self._socket.send(packet)
        except (BlockingIOError, InterruptedError):
            if len(frame) > _INLINE_BYTES:
                self._outgoing.take_back()
            return False
        except OSError as error:
            raise _lost(str(error)) from None
        self._begun += size
        return True

    def _frame(self, packet: bytes) -> bytes | None:
        """The frame that a packet completes."""
        kind, parts = packet[:1], self._parts
        if kind == _INLINE and not parts:
            return packet[1:]
        if kind not in (_IN_RING, _GOES_ON) or len(packet) != 1 + _PLACE.size:
            raise _lost("a packet of no known form")
        offset, size = _PLACE.unpack_from(packet, 1)
        try:
            part = self._incoming.read(offset, size)
        except OutriderError as error:
            raise _lost(error.message) from None
        if kind == _IN_RING and not parts:
            return part
        parts.append(part)
        if sum(map(len, parts)) > MAX_MESSAGE_BYTES:
            raise _lost("a frame that is larger than any message")
        if kind == _GOES_ON:
            return None
        self._parts = []
        return b"".join(parts)


def _lost(why: str) -> ConnectionLostError:
    return ConnectionLostError(f"the lane is lost: {why}", reason="LANE_LOST")
