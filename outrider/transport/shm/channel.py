"""Shared-memory channel: transports frames between threads of two processes on one host.

`ShmChannelSet` holds the channels of one thread, by connection number.
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
"""An encoded frame. The segments of an `EncodedMessage` are copied before `ShmChannel.send`
returns, except for a segment in the channel's own memory (`ShmChannel.reserve_frame`)."""

FrameT = TypeVar("FrameT", bytes, bytes | memoryview)

MAX_PART_BYTES: Final = RING_BYTES // 4
"""Maximum size in bytes of a frame that is sent in one piece. Larger frames are sent in parts of
this size, each of which needs space in the ring only for a short time."""
MAX_INLINE_BYTES: Final = 32 << 10
"""Maximum size in bytes of a frame that is sent in a socket packet. Larger frames go through the
ring."""
_INLINE, _IN_RING, _GOES_ON, _DESCRIPTOR = b"\0", b"\1", b"\2", b"\3"
"""First byte of a packet: a frame in the packet itself; a frame, or its last part, in the ring; a
part that is not the last; or nothing but a file descriptor."""
_ONE_DESCRIPTOR: Final = socket.CMSG_SPACE(array("i", [0]).itemsize)
_PLACE: Final = struct.Struct("<QQ")
"""Offset and size of a frame in the ring."""
RING_POLL_S: Final = 0.001
"""Interval, in seconds, at which a full ring is checked for space, because nothing signals it."""
_LOST: Final = "SHM_CHANNEL_LOST"
_MAX_READ: Final = 64
_MAX_READ_BYTES: Final = RING_BYTES
"""Maximum number of packets, and of bytes, that are read in one call. A peer that sends without end
must not block its reader or fill its memory."""


class ShmClosedError(ConnectionLostError):
    """Raised if the peer has closed its end of a shared-memory channel or has exited."""


class ShmChannel:
    """One end of a shared-memory channel. Only one thread may use it at a time. No method
    blocks."""

    def __init__(
        self, connected: socket.socket, outgoing: RingBuffer, incoming: RingBuffer
    ) -> None:
        """`connected` is a connected socket that preserves packet boundaries (SOCK_SEQPACKET)."""
        connected.setblocking(False)
        self._socket = connected
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent: deque[bytes] = deque()
        self._begun = 0
        """Bytes of the first unsent frame that were already sent in parts."""
        self._parts: list[bytes] = []
        """Received parts of an incomplete frame, each of MAX_PART_BYTES."""
        self._descriptor = -1
        """The file descriptor received last, until it is taken; -1 if there is none."""
        self._broken: OutriderError | None = None
        """Error that ended the incoming direction; raised after the frames received before it."""
        self.ring_full = False
        """Whether unsent frames wait for space in the ring rather than in the socket. In that case
        a writable socket does not mean that they can be sent."""
        self.unsent_bytes = 0
        """Total size in bytes of the unsent frames. The channel does not limit it; the sender
        must."""
        self.closed = False

    def fileno(self) -> int:
        """Return the file descriptor to wait for. It is readable when frames or the end of the
        channel can be received."""
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Number of frames that are not sent yet, because there was no space. `flush` tries to send
        them again."""
        return len(self._unsent)

    def send(self, *frames: Frame) -> None:
        """Send frames in order. Frames for which there is no space are kept for `flush`. Raises
        ConnectionLostError if the peer is gone, and InvalidMessageError for a frame that is larger
        than MAX_MESSAGE_BYTES."""
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
        """Send a file descriptor to the peer, after all frames that were sent before. The caller
        must still close its own descriptor. Raises UnavailableError if earlier frames still wait
        for space, and ConnectionLostError if the peer is gone."""
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
        """Return the file descriptor received last, which the caller must close, or None if none
        was received since the last call."""
        descriptor, self._descriptor = self._descriptor, -1
        return None if descriptor < 0 else descriptor

    def allow_reservations(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Pin the outgoing memory by calling `pin`, so that devices can write into it
        (`RingBuffer.pin_memory`). `reserve_frame` returns memory only if this succeeded."""
        self._outgoing.pin_memory(pin)

    def pin_for_reader(self, pin: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Pin the incoming memory by calling `pin`, so that a device can read the frames of
        `receive_views` in place (`RingBuffer.pin_memory`)."""
        self._incoming.pin_memory(pin)

    def reserve_frame(self, size: int) -> NDArray[np.uint8] | None:
        """Reserve `size` bytes of the ring and return them as an array. A device can write a part
        of a frame into the array, and the frame is then sent without a copy of that part
        (`RingBuffer.reserve_frame`). Returns None if there is no space, or if `size` is so small
        that a copy costs little."""
        if size <= 2 * MAX_INLINE_BYTES or self._unsent:
            return None
        return self._outgoing.reserve_frame(size)

    def flush(self) -> None:
        """Send unsent frames as far as there is space. Raises ConnectionLostError."""
        while self._unsent and self._left_in_part(self._unsent[0]):
            if self._begun >= len(self._unsent[0]):
                self._begun = 0
                self.unsent_bytes -= len(self._unsent.popleft())

    def drop_oldest(self) -> None:
        """Drop the oldest unsent frame, but not one of which a part was already sent."""
        place = int(self._begun > 0)
        if place < len(self._unsent):
            self.unsent_bytes -= len(self._unsent[place])
            del self._unsent[place]

    def receive(self) -> list[bytes]:
        """Return the frames that have arrived. Raises ConnectionLostError at the end of the channel
        or after a malformed packet, once all earlier frames were returned."""
        return self._receive(self._incoming.read_frame)

    def receive_views(self) -> list[bytes | memoryview]:
        """Return the frames that have arrived as `receive` does, but frames in the ring as views
        without a copy. The sender can change the content of a view at any time, and the ring cannot
        reuse the space while the view exists (`RingBuffer.view_frame`)."""
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
        """Return the next packet, or None if there is none now. Raises ConnectionLostError."""
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
                # Reported once if the peer exited without reading everything; its packets can
                # still be read.
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
        """Keep a received file descriptor. Raises ConnectionLostError if the packet is not exactly
        one descriptor, or if another one has not been taken yet."""
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
        """Close this end of the channel. The peer receives the frames sent so far, and then a
        ConnectionLostError. Idempotent."""
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
        """Send a frame in one piece if it fits; return whether it was sent."""
        if size <= MAX_INLINE_BYTES:
            return self._posted(b"".join((_INLINE, *pieces)))
        return size <= MAX_PART_BYTES and self._through_ring(_IN_RING, pieces, size)

    def _left_in_part(self, frame: bytes) -> bool:
        """Send a frame or its next part; return whether there was space."""
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
        """Write a frame or a part of it into the ring and send the packet that announces it; return
        whether there was space for both."""
        offset = self._outgoing.write_frame(pieces, size)
        self.ring_full = offset is None
        if offset is None:
            return False
        if not self._posted(kind + _PLACE.pack(offset, size)):
            self._outgoing.undo_write()
            return False
        return True

    def _posted(self, packet: bytes) -> bool:
        """Send a packet; return whether there was space."""
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
        """Return the frame that a packet completes, or None if further parts follow."""
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
    """The shared-memory channels of one thread. Each belongs to a connection, which has a number.

    When a channel is lost, `on_lost` is called, which must end the connection. Until then messages
    for the connection are dropped, because they could overtake earlier ones if they took another
    path.
    """

    def __init__(self, on_lost: Callable[[int], None], *, borrows: bool = False) -> None:
        """`on_lost` is called with the connection number, on the thread that uses the channels. If
        `borrows` is true, frames are received without a copy where possible
        (`ShmChannel.receive_views`)."""
        self._on_lost = on_lost
        self._borrows = borrows
        self._shm_channels: dict[int, ShmChannel | None] = {}
        """Channels by connection number; None if the channel is lost but its connection still
        exists."""

    def attach_channel(self, number: int, shm_channel: ShmChannel) -> None:
        """Send a connection's messages through this shared-memory channel from now on."""
        self._shm_channels[number] = shm_channel

    def detach_channel(self, number: int) -> None:
        """Close and remove the channel of a connection that has ended; idempotent."""
        shm_channel = self._shm_channels.pop(number, None)
        if shm_channel is not None:
            shm_channel.close()

    def close(self) -> None:
        """Close all shared-memory channels."""
        for number in list(self._shm_channels):
            self.detach_channel(number)

    def has_channel(self, number: int) -> bool:
        """Return whether a connection's messages go through a shared-memory channel, even if the
        channel is lost."""
        return number in self._shm_channels

    @property
    def readers(self) -> list[int]:
        """File descriptors of all channels. When some of them are readable, pass these to
        `receive`."""
        return [channel.fileno() for channel in self._shm_channels.values() if channel is not None]

    @property
    def writers(self) -> list[int]:
        """File descriptors of the channels whose unsent frames wait for space in the socket. When
        one of them is writable, call `flush`. For frames that wait for space in a ring, see
        `poll_timeout`."""
        return [channel.fileno() for channel in self._unsent() if not channel.ring_full]

    def poll_timeout(self, timeout_s: float | None) -> float | None:
        """Return the timeout in seconds with which a caller should wait for `readers` and
        `writers`; None means no limit. `timeout_s` is the timeout that the caller would use
        otherwise.

        While a ring is full, the result is at most RING_POLL_S, because nothing signals that a full
        ring has space again.
        """
        if not any([channel.ring_full for channel in self._unsent()]):
            return timeout_s
        return RING_POLL_S if timeout_s is None else min(timeout_s, RING_POLL_S)

    def send_frames(self, number: int, *frames: Frame) -> ShmChannel | None:
        """Send frames over the channel of a connection, or keep them for `flush` if there is no
        space. Returns the channel, or None if it is lost. The caller must limit the channel's
        `unsent_bytes`."""
        shm_channel = self._shm_channels[number]
        if shm_channel is not None:
            try:
                shm_channel.send(*frames)
            except OutriderError as error:
                self._lose(number, error)
                return None
        return shm_channel

    def send_descriptor(self, number: int, descriptor: int) -> None:
        """Send a file descriptor to a connection's peer. The caller must still close its own
        descriptor."""
        shm_channel = self._shm_channels.get(number)
        if shm_channel is not None:
            try:
                shm_channel.send_descriptor(descriptor)
            except OutriderError as error:
                self._lose(number, error)

    def take_descriptor(self, number: int) -> int | None:
        """Return the file descriptor that a connection's peer sent last, which the caller must
        close, or None if there is none."""
        shm_channel = self._shm_channels.get(number)
        return None if shm_channel is None else shm_channel.take_descriptor()

    def reserve(self, number: int, size: int) -> NDArray[np.uint8] | None:
        """Reserve space in the ring of a connection's channel (`ShmChannel.reserve_frame`). Returns
        None if the connection has no channel or there is no space."""
        shm_channel = self._shm_channels.get(number)
        return None if shm_channel is None else shm_channel.reserve_frame(size)

    def flush(self) -> None:
        """Send the unsent frames of all channels, as far as there is space."""
        for number, shm_channel in list(self._shm_channels.items()):
            if shm_channel is not None and shm_channel.num_unsent:
                try:
                    shm_channel.flush()
                except OutriderError as error:
                    self._lose(number, error)

    def receive(self, ready: Iterable[int]) -> list[tuple[int, bytes | memoryview]]:
        """Return the frames that have arrived on the channels with the file descriptors `ready`, as
        pairs of connection number and frame."""
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
        """Return the shared-memory channels with unsent frames."""
        shm_channels = self._shm_channels.values()
        return [channel for channel in shm_channels if channel is not None and channel.num_unsent]

    def drop_channel(self, number: int, why: str) -> None:
        """Close the channel of a connection, log the reason `why`, and call `on_lost`.
        Idempotent."""
        self._give_up(number, why, logging.WARNING)

    def _lose(self, number: int, error: OutriderError) -> None:
        # A peer that leaves closes its shared-memory channel first. The owner of the connection
        # logs how the connection ended.
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
