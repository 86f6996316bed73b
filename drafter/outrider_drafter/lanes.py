"""The lanes to verifiers of this host: the drafting thread reads and writes them itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from outrider.errors import InvalidMessageError, OutriderError
from outrider.transport.lane import Lane
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import Encoded, Heartbeat, Welcome
from outrider_drafter.engine import Answers, SessionMessage
from outrider_drafter.metrics import Metrics

logger = logging.getLogger(__name__)


class Lanes:
    """By connection; drafting thread only."""

    def __init__(
        self, metrics: Metrics, *, max_unsent: int, on_lost: Callable[[int], None]
    ) -> None:
        """`max_unsent` bounds the answers that wait for a verifier that does not read; `on_lost` is
        told of the connection, on the drafting thread."""
        self._metrics = metrics
        self._max_unsent = max_unsent
        self._on_lost = on_lost
        self._lanes: dict[int, Lane | None] = {}
        """None: lost, while its connection still stands."""

    def attach(self, connection: int, lane: Lane) -> None:
        """From here on a connection's messages go by this lane."""
        self._lanes[connection] = lane

    def detach(self, connection: int) -> None:
        """The connection is gone; idempotent."""
        lane = self._lanes.pop(connection, None)
        if lane is not None:
            lane.close()

    def close(self) -> None:
        """Close all lanes."""
        for connection in list(self._lanes):
            self.detach(connection)

    def carries(self, connection: int) -> bool:
        """Whether a connection's messages go by a lane."""
        return connection in self._lanes

    @property
    def readers(self) -> list[int]:
        """What to wait for."""
        return [lane.fileno() for lane in self._lanes.values() if lane is not None]

    @property
    def writers(self) -> list[int]:
        """What to wait for, to go on with `flush`."""
        open_lanes = (lane for lane in self._lanes.values() if lane is not None)
        return [lane.fileno() for lane in open_lanes if lane.unsent]

    def send(self, answers: Answers) -> Answers:
        """Send what goes by lanes; returns the rest."""
        rest: Answers = []
        for connection, message in answers:
            if connection not in self._lanes:
                rest.append((connection, message))
                continue
            lane = self._lanes[connection]
            if lane is None:
                self._metrics.dropped_proposals.inc()
                continue
            try:
                lane.send(encode_drafter_message(message))
            except OutriderError as error:
                self._lose(connection, error)
                continue
            while lane.unsent > self._max_unsent:
                lane.drop_oldest()
                self._metrics.dropped_proposals.inc()
        return rest

    def flush(self) -> None:
        """Send on what found no room before."""
        for connection, lane in list(self._lanes.items()):
            if lane is not None and lane.unsent:
                try:
                    lane.flush()
                except OutriderError as error:
                    self._lose(connection, error)

    def receive(self, ready: Iterable[int]) -> list[tuple[int, SessionMessage]]:
        """(connection, message) of what verifiers say, by the lanes with these descriptors."""
        ready = set(ready)
        told: list[tuple[int, SessionMessage]] = []
        for connection, lane in list(self._lanes.items()):
            if lane is None or lane.fileno() not in ready:
                continue
            try:
                frames = lane.receive()
            except OutriderError as error:
                self._lose(connection, error)
                continue
            for frame in frames:
                told += [(connection, message) for message in self._messages(frame)]
        return told

    def _messages(self, frame: bytes) -> list[SessionMessage]:
        messages: list[SessionMessage] = []
        for message in decode_verifier_messages(frame):
            if isinstance(message, InvalidMessageError):
                self._metrics.ignored_messages.labels("malformed").inc()
                logger.warning("malformed message", extra={"reason": message.message})
            elif not isinstance(message, Heartbeat | Welcome | Encoded):
                messages.append(message)
        return messages

    def _lose(self, connection: int, error: OutriderError) -> None:
        lane = self._lanes[connection]
        if lane is None:
            return
        logger.warning("lane lost", extra={"reason": error.message})
        self._lanes[connection] = None
        lane.close()
        self._on_lost(connection)
