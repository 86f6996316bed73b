"""The lanes of attached drafters, as the engine thread uses them: it writes and reads them itself.

A lane belongs to a link. One that is lost takes its link along: the hub is told, which ends the
connection; until then what is meant for the link is dropped, for nothing may overtake it elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import InvalidMessageError, OutriderError
from outrider.transport.lane import Lane
from outrider.wire.codec import decode_drafter_messages, encode_verifier_messages
from outrider.wire.messages import VerifierMessage
from outrider_verifier.checks import DrafterChecks
from outrider_verifier.commands import Command

logger = logging.getLogger(__name__)


class Lanes:
    """By link; engine thread only, but for `counters`, which is read anywhere."""

    def __init__(
        self, checks: DrafterChecks, *, queue_bytes: int, on_lost: Callable[[int], None]
    ) -> None:
        """`queue_bytes` bounds what may wait for a drafter that does not read; `on_lost` is told
        of the link, on the engine thread."""
        self._checks = checks
        self._queue_bytes = queue_bytes
        self._on_lost = on_lost
        self._lanes: dict[int, Lane | None] = {}
        """None: lost, while its link is still attached."""
        self.counters: Counter[str] = checks.counters

    def attach(self, link_id: int, lane: Lane) -> None:
        """From here on a link's messages go by this lane."""
        self._lanes[link_id] = lane

    def detach(self, link_id: int) -> None:
        """The link is gone; idempotent."""
        lane = self._lanes.pop(link_id, None)
        if lane is not None:
            lane.close()

    def close(self) -> None:
        """Close all lanes."""
        for link_id in list(self._lanes):
            self.detach(link_id)

    def carries(self, link_id: int) -> bool:
        """Whether a link's messages go by a lane."""
        return link_id in self._lanes

    @property
    def readers(self) -> list[int]:
        """What to wait for."""
        return [lane.fileno() for lane in self._lanes.values() if lane is not None]

    @property
    def writers(self) -> list[int]:
        """What to wait for, to go on with `flush`."""
        open_lanes = (lane for lane in self._lanes.values() if lane is not None)
        return [lane.fileno() for lane in open_lanes if lane.unsent]

    def tell(self, link_id: int, messages: Sequence[VerifierMessage]) -> None:
        """Send messages together; what finds no room waits for `flush`."""
        lane = self._lanes[link_id]
        if lane is None:
            return
        try:
            lane.send(*encode_verifier_messages(messages))
        except OutriderError as error:
            self._lose(link_id, error)
            return
        if lane.unsent_bytes > self._queue_bytes:
            self.counters["drafters_overflowed"] += 1
            self._lose(link_id, "the drafter does not read")

    def flush(self) -> None:
        """Send on what found no room before."""
        for link_id, lane in list(self._lanes.items()):
            if lane is not None and lane.unsent:
                try:
                    lane.flush()
                except OutriderError as error:
                    self._lose(link_id, error)

    def receive(self, ready: Iterable[int]) -> list[Command]:
        """What drafters ask of the engine, by the lanes with these file descriptors."""
        ready = set(ready)
        commands: list[Command] = []
        for link_id, lane in list(self._lanes.items()):
            if lane is None or lane.fileno() not in ready:
                continue
            try:
                frames = lane.receive()
            except OutriderError as error:
                self._lose(link_id, error)
                continue
            for frame in frames:
                commands += self._commands(link_id, frame)
        return commands

    def _commands(self, link_id: int, frame: bytes) -> list[Command]:
        found: list[Command] = []
        for message in decode_drafter_messages(frame):
            if isinstance(message, InvalidMessageError):
                self._checks.count_invalid(message)
                continue
            command = self._checks.command(link_id, message)
            if command is not None:
                found.append(command)
        return found

    def _lose(self, link_id: int, why: OutriderError | str) -> None:
        lane = self._lanes[link_id]
        if lane is None:
            return
        logger.warning("lane lost", extra={"link": link_id, "reason": str(why)})
        self._lanes[link_id] = None
        lane.close()
        self._on_lost(link_id)
