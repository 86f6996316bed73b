"""The lanes of one working thread, by the number of the connection that each belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.transport.shm.channel import RING_LOOK_S, Frame, Lane, LaneClosedError

logger = logging.getLogger(__name__)


class LaneSet:
    """Used by one thread. A lane that is lost takes its connection along: `on_lost` is told, which
    ends it; until then what is meant for it is dropped, for nothing may overtake it elsewhere."""

    def __init__(self, on_lost: Callable[[int], None], *, borrows: bool = False) -> None:
        """`on_lost` is told of the connection, on the thread that uses the lanes. `borrows`: frames
        are received where they lie, if that can be (`Lane.borrow`)."""
        self._on_lost = on_lost
        self._borrows = borrows
        self._lanes: dict[int, Lane | None] = {}
        """None: lost, while its connection still stands."""

    def attach(self, number: int, lane: Lane) -> None:
        """From here on a connection's messages go by this lane."""
        self._lanes[number] = lane

    def detach(self, number: int) -> None:
        """The connection is gone; idempotent."""
        lane = self._lanes.pop(number, None)
        if lane is not None:
            lane.close()

    def close(self) -> None:
        """Close all lanes."""
        for number in list(self._lanes):
            self.detach(number)

    def carries(self, number: int) -> bool:
        """Whether a connection's messages go by a lane, if one that is lost."""
        return number in self._lanes

    @property
    def readers(self) -> list[int]:
        """File descriptors to wait for; `receive` takes those that are ready."""
        return [lane.fileno() for lane in self._lanes.values() if lane is not None]

    @property
    def writers(self) -> list[int]:
        """File descriptors to wait for, to go on with `flush`; see `within`, too."""
        return [lane.fileno() for lane in self._unsent() if not lane.ring_full]

    def within(self, timeout_s: float | None) -> float | None:
        """For how long to wait for `readers` and `writers` where `timeout_s` is meant, None being
        for ever: nobody says when a ring that is full has room again, so that has to be looked at.
        """
        if not any([lane.ring_full for lane in self._unsent()]):
            return timeout_s
        return RING_LOOK_S if timeout_s is None else min(timeout_s, RING_LOOK_S)

    def send(self, number: int, *frames: Frame) -> Lane | None:
        """Send frames, or keep what finds no room for `flush`; the lane, whose owner bounds what it
        keeps, or None if it is lost."""
        lane = self._lanes[number]
        if lane is not None:
            try:
                lane.send(*frames)
            except OutriderError as error:
                self._lose(number, error)
                return None
        return lane

    def reserve(self, number: int, size: int) -> NDArray[np.uint8] | None:
        """A place for what others write into a frame for this connection (`Lane.reserve`)."""
        lane = self._lanes.get(number)
        return None if lane is None else lane.reserve(size)

    def flush(self) -> None:
        """Send on what found no room before."""
        for number, lane in list(self._lanes.items()):
            if lane is not None and lane.unsent:
                try:
                    lane.flush()
                except OutriderError as error:
                    self._lose(number, error)

    def receive(self, ready: Iterable[int]) -> list[tuple[int, bytes | memoryview]]:
        """(connection, frame) of all that has come by the lanes with these file descriptors."""
        ready = set(ready)
        found: list[tuple[int, bytes | memoryview]] = []
        for number, lane in list(self._lanes.items()):
            if lane is None or lane.fileno() not in ready:
                continue
            try:
                frames = lane.borrow() if self._borrows else lane.receive()
                found += [(number, frame) for frame in frames]
            except OutriderError as error:
                self._lose(number, error)
        return found

    def _unsent(self) -> list[Lane]:
        """The lanes that keep something."""
        lanes = self._lanes.values()
        return [lane for lane in lanes if lane is not None and lane.unsent]

    def lose(self, number: int, why: str) -> None:
        """Give a lane up, and its connection with it; idempotent."""
        self._give_up(number, why, logging.WARNING)

    def _lose(self, number: int, error: OutriderError) -> None:
        # A peer that leaves closes its lane first. How its connection has ended, well or not, is
        # logged by the owner of the connection.
        closed = isinstance(error, LaneClosedError)
        self._give_up(number, error.message, logging.INFO if closed else logging.WARNING)

    def _give_up(self, number: int, why: str, level: int) -> None:
        lane = self._lanes[number]
        if lane is None:
            return
        event = "lane closed" if level == logging.INFO else "lane lost"
        logger.log(level, event, extra={"connection": number, "reason": why})
        self._lanes[number] = None
        lane.close()
        self._on_lost(number)
