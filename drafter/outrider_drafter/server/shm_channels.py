"""Shared-memory channels to verifiers on the same host, read and written by the drafting thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.transport.shm import ShmChannel, ShmChannelSet
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import EncodedMessage, Heartbeat, ReplicaCommand, Welcome
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.draft_engine import OutgoingProposals, SessionMessage

logger = logging.getLogger(__name__)


class VerifierShmChannels(ShmChannelSet):
    """Shared-memory channels by connection; drafting thread only."""

    def __init__(
        self,
        metrics: DrafterMetrics,
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

    def attach_channel(self, number: int, shm_channel: ShmChannel) -> None:
        """See `ShmChannelSet`."""
        shm_channel.pin_for_reader(self._pin)
        super().attach_channel(number, shm_channel)

    def send_answers(self, answers: OutgoingProposals) -> OutgoingProposals:
        """Send what goes by shared-memory channels; returns the rest."""
        rest: OutgoingProposals = []
        for connection, message in answers:
            if not self.has_channel(connection):
                rest.append((connection, message))
                continue
            shm_channel = self.send_frames(connection, encode_drafter_message(message))
            if shm_channel is None:
                self._metrics.dropped_proposals.inc()
                continue
            while shm_channel.num_unsent > self._max_unsent:
                shm_channel.drop_oldest()
                self._metrics.dropped_proposals.inc()
        return rest

    def receive_messages(self, ready: Iterable[int]) -> list[tuple[int, SessionMessage]]:
        """(connection, message) of what verifiers say, by the shared-memory channels with these
        descriptors."""
        found: list[tuple[int, SessionMessage]] = []
        for connection, frame in self.receive(ready):
            for message in decode_verifier_messages(frame):
                if isinstance(message, InvalidMessageError):
                    self._metrics.ignored_messages.labels("malformed").inc()
                    logger.warning("malformed message", extra={"reason": message.message})
                elif isinstance(message, ReplicaCommand):
                    # Drafters have no replicas.
                    self._metrics.ignored_messages.labels("replica").inc()
                elif not isinstance(message, Heartbeat | Welcome | EncodedMessage):
                    found.append((connection, message))
        return found
