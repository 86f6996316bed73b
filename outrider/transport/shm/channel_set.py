"""Shared-memory channels of one working thread, by connection number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.transport.shm.channel import RING_POLL_S, Frame, ShmChannel, ShmClosedError

logger = logging.getLogger(__name__)


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
