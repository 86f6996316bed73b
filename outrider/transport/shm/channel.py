"""Shared-memory channel: frames between working threads of two processes on one host.

`ShmChannelSet` holds the channels of one working thread, by connection number.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import (
    ConnectionLostError,
    InvalidMessageError,
    OutriderError,
    UnavailableError,
)
from outrider.transport.shm.ring_buffer import RING_BYTES, RingBuffer
from outrider.wire.limits import MAX_MESSAGE_BYTES
from outrider.wire.messages import EncodedMessage

logger = logging.getLogger(__name__)

Frame = bytes | EncodedMessage
"""Encoded: one that may lie in pieces, which are copied before `ShmChannel.send` returns, but for
what lies in the shared-memory channel's own memory (`ShmChannel.reserve`)."""

FrameT = TypeVar("FrameT", bytes, bytes | memoryview)

MAX_PART_BYTES: Final = RING_BYTES // 4
"""Larger frames cross in parts of this size: for these a ring has room again and again."""
MAX_INLINE_BYTES: Final = 32 << 10
"""Frames up to this size cross in the packet itself."""
_INLINE, _IN_RING, _GOES_ON, _DESCRIPTOR = b"\0", b"\1", b"\2", b"\3"
"""A frame in the packet; a frame or its last part in the ring; a part that is not the last; nothing
but a file descriptor."""
_ONE_DESCRIPTOR: Final = socket.CMSG_SPACE(array("i", [0]).itemsize)
_PLACE: Final = struct.Struct("<QQ")
"""Offset and size of a frame in the ring."""
RING_POLL_S: Final = 0.001
"""How often it is looked whether a ring that is full has room: nobody says so."""
_LOST: Final = "SHM_CHANNEL_LOST"
_MAX_READ: Final = 64
_MAX_READ_BYTES: Final = RING_BYTES
"""Packets, and bytes of frames, taken at once: a peer that never stops must not keep its reader
from all else, nor fill its memory."""


class ShmClosedError(ConnectionLostError):
    """The peer has closed its end of a shared-memory channel or has exited; the connection ends."""


class ShmChannel:
    """One end of a shared-memory channel. Used by one thread at a time; nothing blocks."""

    def __init__(
        self, connected: socket.socket, outgoing: RingBuffer, incoming: RingBuffer
    ) -> None:
        """`connected` keeps packets apart (SOCK_SEQPACKET)."""
        connected.setblocking(False)
        self._socket = connected
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent: deque[bytes] = deque()
        self._begun = 0
        """Bytes of the first of these that have left in parts."""
        self._parts: list[bytes] = []
        """Of a frame that is not here as a whole yet; all are of PART_BYTES."""
        self._descriptor = -1
        """The file descriptor that came last, until it is taken."""
        self._broken: OutriderError | None = None
        """What ended what can be received, behind the frames before it."""
        self.ring_full = False
        """Whether it is the ring in which what is unsent finds no room: a socket that can be
        written to says nothing of that."""
        self.unsent_bytes = 0
        """Size of the frames that did not find room yet; their sender bounds it."""
        self.closed = False

    def fileno(self) -> int:
        """What to wait for: readable when frames, or the end, are there."""
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Frames that did not find room yet; `flush` tries again."""
        return len(self._unsent)

    def send(self, *frames: Frame) -> None:
        """Hand frames over, in order, or keep them until there is room. Raises ConnectionLostError
        when the peer is gone, InvalidMessageError for a frame that no shared-memory channel
        carries."""
        sizes = [_size(frame) for frame in frames]
        if (most := max(sizes, default=0)) > MAX_MESSAGE_BYTES:
            raise InvalidMessageError(
                f"a frame of {most} bytes, a shared-memory channel carries {MAX_MESSAGE_BYTES}",
                reason="SHM_FRAME",
            )
        for frame, size in zip(frames, sizes, strict=True):
            pieces = frame.segments if isinstance(frame, EncodedMessage) else (frame,)
            if self._unsent or not self._left_at_once(pieces, size):
                self._unsent.append(frame.data if isinstance(frame, EncodedMessage) else frame)
                self.unsent_bytes += size
        self.flush()

    def send_descriptor(self, descriptor: int) -> None:
        """Pass a file descriptor behind all frames so far; it stays the caller's. Raises
        UnavailableError where frames wait for room, ConnectionLostError when the peer is gone."""
        if self._unsent:
            raise UnavailableError(
                "frames wait for room in the shared-memory channel", reason="SHM_CHANNEL_BUSY"
            )
        try:
            socket.send_fds(self._socket, [_DESCRIPTOR], [descriptor])
        except (BlockingIOError, InterruptedError):
            raise UnavailableError(
                "the shared-memory channel takes no packet now", reason="SHM_CHANNEL_BUSY"
            ) from None
        except OSError as error:
            raise _lost(str(error)) from None

    def take_descriptor(self) -> int | None:
        """The file descriptor that came before the frames received last, which is the caller's to
        close from here on; None: none came since."""
        descriptor, self._descriptor = self._descriptor, -1
        return None if descriptor < 0 else descriptor

    def allow_reservations(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """From here on places can be reserved, if `pin` can have the memory written to by whoever
        will write into them (`RingBuffer.pin_memory`)."""
        self._outgoing.pin_memory(pin)

    def pin_for_reader(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Have what is borrowed pinned for a device that reads it there
        (`RingBuffer.pin_memory`)."""
        self._incoming.pin_memory(pin)

    def reserve_frame(self, size: int) -> NDArray[np.uint8] | None:
        """A place for what others write into a frame, which is then sent as it lies there
        (`RingBuffer.reserve_frame`); None where there is none, or copying is as good."""
        if size <= 2 * MAX_INLINE_BYTES or self._unsent:
            return None
        return self._outgoing.reserve_frame(size)

    def flush(self) -> None:
        """Send what there is room for by now. Raises ConnectionLostError."""
        while self._unsent and self._left_in_part(self._unsent[0]):
            if self._begun >= len(self._unsent[0]):
                self._begun = 0
                self.unsent_bytes -= len(self._unsent.popleft())

    def drop_oldest(self) -> None:
        """Forget the frame that has been unsent for longest, but for one that is under way."""
        place = int(self._begun > 0)
        if place < len(self._unsent):
            self.unsent_bytes -= len(self._unsent[place])
            del self._unsent[place]

    def receive(self) -> list[bytes]:
        """The frames that have arrived. Raises ConnectionLostError at the end, and at a packet of
        no known form, behind which nothing counts: once the frames before it were given."""
        return self._receive(self._incoming.read_frame)

    def receive_views(self) -> list[bytes | memoryview]:
        """As `receive`, but what crossed in the ring as a whole is given where it lies: its sender
        may change it at any time, and finds no room while it is kept (`RingBuffer.view_frame`)."""
        return self._receive(self._incoming.view_frame)

    def _receive(self, take: Callable[[int, int], FrameT]) -> list[bytes | FrameT]:
        frames: list[bytes | FrameT] = []
        size = 0
        try:
            for _ in range(_MAX_READ):
                packet = self._next_packet()
                frame = None if packet is None else self._frame(packet, take)
                if frame is not None:
                    frames.append(frame)
                    size += len(frame)
                if packet is None or size >= _MAX_READ_BYTES:
                    break
        except ConnectionLostError as error:
            self._broken = error
            if not frames:
                raise
        return frames

    def _next_packet(self) -> bytes | None:
        """None if there is none now. Raises ConnectionLostError."""
        if self._broken is not None:
            raise self._broken.copy()
        while True:
            try:
                packet, ancillary, _, _ = self._socket.recvmsg(
                    MAX_INLINE_BYTES + 1, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return None
            except ConnectionResetError:
                # Said once where a peer went without having read all; what it sent is there still.
                continue
            except OSError as error:
                raise _lost(str(error)) from None
            if ancillary or packet == _DESCRIPTOR:
                self._keep_descriptor(packet, ancillary)
                continue
            if not packet:
                raise ShmClosedError(
                    "the peer closed its end of the shared-memory channel", reason=_LOST
                )
            return packet

    def _keep_descriptor(self, packet: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Raises ConnectionLostError unless the packet is one file descriptor, the only one that
        waits."""
        found = array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        if packet == _DESCRIPTOR and len(found) == 1 and self._descriptor < 0:
            self._descriptor = found[0]
            return
        for descriptor in found:
            os.close(descriptor)
        raise _lost("a file descriptor that was not asked for")

    def close(self) -> None:
        """Close this end; idempotent. The peer is told."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._unsent.clear()
        self._outgoing.close()
        self._incoming.close()

    def _left_at_once(self, pieces: Sequence[bytes | memoryview], size: int) -> bool:
        """Whether a frame needs no parts, and there was room for it."""
        if size <= MAX_INLINE_BYTES:
            return self._posted(b"".join((_INLINE, *pieces)))
        return size <= MAX_PART_BYTES and self._through_ring(_IN_RING, pieces, size)

    def _left_in_part(self, frame: bytes) -> bool:
        """Whether there was room for a frame, or its next part."""
        if not self._begun and self._left_at_once((frame,), len(frame)):
            self._begun = len(frame)
            return True
        if len(frame) <= MAX_PART_BYTES:
            return False
        part = memoryview(frame)[self._begun : self._begun + MAX_PART_BYTES]
        last = self._begun + len(part) == len(frame)
        if not self._through_ring(_IN_RING if last else _GOES_ON, (part,), len(part)):
            return False
        self._begun += len(part)
        return True

    def _through_ring(self, kind: bytes, pieces: Sequence[bytes | memoryview], size: int) -> bool:
        """Whether there was room for a frame or a part of one in the ring, and for word of it."""
        offset = self._outgoing.write_frame(pieces, size)
        self.ring_full = offset is None
        if offset is None:
            return False
        if not self._posted(kind + _PLACE.pack(offset, size)):
            self._outgoing.undo_write()
            return False
        return True

    def _posted(self, packet: bytes) -> bool:
        """Whether there was room for a packet."""
        try:
            self._socket.send(packet)
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            raise ShmClosedError(
                "the peer closed its end of the shared-memory channel", reason=_LOST
            ) from None
        except OSError as error:
            raise _lost(str(error)) from None
        return True

    def _frame(self, packet: bytes, take: Callable[[int, int], FrameT]) -> bytes | FrameT | None:
        """The frame that a packet completes."""
        kind, parts = packet[:1], self._parts
        if kind == _INLINE and not parts:
            return packet[1:]
        if kind not in (_IN_RING, _GOES_ON) or len(packet) != 1 + _PLACE.size:
            raise _lost("a packet of no known form")
        offset, size = _PLACE.unpack_from(packet, 1)
        try:
            if kind == _IN_RING and not parts:
                return take(offset, size)
            part = self._incoming.read_frame(offset, size)
        except OutriderError as error:
            raise _lost(error.message) from None
        if kind == _GOES_ON and size != MAX_PART_BYTES:
            raise _lost("a part of another size than parts have")
        if len(parts) * MAX_PART_BYTES + size > MAX_MESSAGE_BYTES:
            raise _lost("a frame that is larger than any message")
        parts.append(part)
        if kind == _GOES_ON:
            return None
        self._parts = []
        return b"".join(parts)


def _size(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, EncodedMessage) else len(frame)


def _lost(why: str) -> ConnectionLostError:
    return ConnectionLostError(f"the shared-memory channel is lost: {why}", reason=_LOST)


class ShmChannelSet:
    """Holds the shared-memory channels of one thread. When a channel is lost, `on_lost` ends its
    connection; until then messages for it are dropped, so that none overtakes an earlier one on
    another path."""

    def __init__(self, on_lost: Callable[[int], None], *, borrows: bool = False) -> None:
        """`on_lost` is told of the connection, on the thread that uses the shared-memory channels.
        `borrows`: frames are received where they lie, if that can be
        (`ShmChannel.receive_views`)."""
        self._on_lost = on_lost
        self._borrows = borrows
        self._shm_channels: dict[int, ShmChannel | None] = {}
        """None: lost, while its connection still stands."""

    def attach_channel(self, number: int, shm_channel: ShmChannel) -> None:
        """From here on a connection's messages go by this shared-memory channel."""
        self._shm_channels[number] = shm_channel

    def detach_channel(self, number: int) -> None:
        """The connection is gone; idempotent."""
        shm_channel = self._shm_channels.pop(number, None)
        if shm_channel is not None:
            shm_channel.close()

    def close(self) -> None:
        """Close all shared-memory channels."""
        for number in list(self._shm_channels):
            self.detach_channel(number)

    def has_channel(self, number: int) -> bool:
        """Whether a connection's messages go by a shared-memory channel, if one that is lost."""
        return number in self._shm_channels

    @property
    def readers(self) -> list[int]:
        """File descriptors to wait for; `receive` takes those that are ready."""
        return [channel.fileno() for channel in self._shm_channels.values() if channel is not None]

    @property
    def writers(self) -> list[int]:
        """File descriptors to wait for, to go on with `flush`; see `within`, too."""
        return [channel.fileno() for channel in self._unsent() if not channel.ring_full]

    def poll_timeout(self, timeout_s: float | None) -> float | None:
        """For how long to wait for `readers` and `writers` where `timeout_s` is meant, None being
        for ever: nobody says when a ring that is full has room again, so that has to be looked at.
        """
        if not any([channel.ring_full for channel in self._unsent()]):
            return timeout_s
        return RING_POLL_S if timeout_s is None else min(timeout_s, RING_POLL_S)

    def send_frames(self, number: int, *frames: Frame) -> ShmChannel | None:
        """Send frames, or keep what finds no room for `flush`; the shared-memory channel, whose
        owner bounds what it keeps, or None if it is lost."""
        shm_channel = self._shm_channels[number]
        if shm_channel is not None:
            try:
                shm_channel.send(*frames)
            except OutriderError as error:
                self._lose(number, error)
                return None
        return shm_channel

    def send_descriptor(self, number: int, descriptor: int) -> None:
        """Pass a file descriptor to a connection's peer; it stays the caller's."""
        shm_channel = self._shm_channels.get(number)
        if shm_channel is not None:
            try:
                shm_channel.send_descriptor(descriptor)
            except OutriderError as error:
                self._lose(number, error)

    def take_descriptor(self, number: int) -> int | None:
        """The file descriptor that a connection's peer passed last, which is the caller's to close
        from here on; None: there is none."""
        shm_channel = self._shm_channels.get(number)
        return None if shm_channel is None else shm_channel.take_descriptor()

    def reserve(self, number: int, size: int) -> NDArray[np.uint8] | None:
        """A place for what others write into a frame for this connection (`ShmChannel.reserve`)."""
        shm_channel = self._shm_channels.get(number)
        return None if shm_channel is None else shm_channel.reserve_frame(size)

    def flush(self) -> None:
        """Send on what found no room before."""
        for number, shm_channel in list(self._shm_channels.items()):
            if shm_channel is not None and shm_channel.num_unsent:
                try:
                    shm_channel.flush()
                except OutriderError as error:
                    self._lose(number, error)

    def receive(self, ready: Iterable[int]) -> list[tuple[int, bytes | memoryview]]:
        """(connection, frame) of all that has come by the shared-memory channels with these file
        descriptors."""
        ready = set(ready)
        found: list[tuple[int, bytes | memoryview]] = []
        for number, shm_channel in list(self._shm_channels.items()):
            if shm_channel is None or shm_channel.fileno() not in ready:
                continue
            try:
                frames = shm_channel.receive_views() if self._borrows else shm_channel.receive()
                found += [(number, frame) for frame in frames]
            except OutriderError as error:
                self._lose(number, error)
        return found

    def _unsent(self) -> list[ShmChannel]:
        """The shared-memory channels that keep something."""
        shm_channels = self._shm_channels.values()
        return [channel for channel in shm_channels if channel is not None and channel.num_unsent]

    def drop_channel(self, number: int, why: str) -> None:
        """Give a shared-memory channel up, and its connection with it; idempotent."""
        self._give_up(number, why, logging.WARNING)

    def _lose(self, number: int, error: OutriderError) -> None:
        # A peer that leaves closes its shared-memory channel first. How its connection has ended,
        # well or not, is logged by the owner of the connection.
        closed = isinstance(error, ShmClosedError)
        self._give_up(number, error.message, logging.INFO if closed else logging.WARNING)

    def _give_up(self, number: int, why: str, level: int) -> None:
        shm_channel = self._shm_channels[number]
        if shm_channel is None:
            return
        event = (
            "shared-memory channel closed"
            if level == logging.INFO
            else "shared-memory channel lost"
        )
        logger.log(level, event, extra={"connection": number, "reason": why})
        self._shm_channels[number] = None
        shm_channel.close()
        self._on_lost(number)
