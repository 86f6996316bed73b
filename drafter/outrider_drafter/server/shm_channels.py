"""The lanes to verifiers of this host: the drafting thread reads and writes them itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.transport.shm import Lane, LaneSet
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import Encoded, Heartbeat, Welcome
from outrider_drafter.metrics import Metrics
from outrider_drafter.server.draft_engine import Answers, SessionMessage

logger = logging.getLogger(__name__)


class Lanes(LaneSet):
    """By connection; drafting thread only."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        max_unsent: int,
        on_lost: Callable[[int], None],
        pin: Callable[[NDArray[np.uint8]], bool],
    ) -> None:
        """`max_unsent` bounds the answers that wait for a verifier that does not read; `pin` pins
        memory for the device that copies features from it."""
        # Features go from there to where the device reads them.
        super().__init__(on_lost, borrows=True)
        self._metrics = metrics
        self._max_unsent = max_unsent
        self._pin = pin

    def attach(self, number: int, lane: Lane) -> None:
        """See `LaneSet`."""
        lane.read_by(self._pin)
        super().attach(number, lane)

    def answer(self, answers: Answers) -> Answers:
        """Send what goes by lanes; returns the rest."""
        rest: Answers = []
        for connection, message in answers:
            if not self.carries(connection):
                rest.append((connection, message))
                continue
            lane = self.send(connection, encode_drafter_message(message))
            if lane is None:
                self._metrics.dropped_proposals.inc()
                continue
            while lane.unsent > self._max_unsent:
                lane.drop_oldest()
                self._metrics.dropped_proposals.inc()
        return rest

    def messages(self, ready: Iterable[int]) -> list[tuple[int, SessionMessage]]:
        """(connection, message) of what verifiers say, by the lanes with these descriptors."""
        found: list[tuple[int, SessionMessage]] = []
        for connection, frame in self.receive(ready):
            for message in decode_verifier_messages(frame):
                if isinstance(message, InvalidMessageError):
                    self._metrics.ignored_messages.labels("malformed").inc()
                    logger.warning("malformed message", extra={"reason": message.message})
                elif not isinstance(message, Heartbeat | Welcome | Encoded):
                    found.append((connection, message))
        return found
