"""Shared-memory channels to verifiers on the same host, read and written by the drafting thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError, OutriderError
from outrider.transport.shm import ShmChannel, ShmChannelSet
from outrider.wire.codec import decode_verifier_messages, encode_drafter_message
from outrider.wire.messages import (
    EncodedMessage,
    Heartbeat,
    ReplicaAnswer,
    ReplicaCommand,
    ReplicaOffer,
    ReplicaRefused,
    Welcome,
)
from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.server.draft_engine import OutgoingProposals, SessionMessage

logger = logging.getLogger(__name__)


class ReplicaTable(Protocol):
    """Replicas by connection: `outrider_drafter.gpu.replicas.Replicas`, which imports Triton."""

    def make_replica(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> tuple[ReplicaAnswer, int | None]:
        """Take an offer up."""
        ...

    def handle_command(self, connection: int, command: ReplicaCommand) -> bool:
        """Do what a verifier says of its replica; whether it goes on."""
        ...

    def close(self, connection: int) -> None:
        """A connection is gone."""


class VerifierShmChannels(ShmChannelSet):
    """Shared-memory channels by connection; drafting thread only."""

    def __init__(
        self,
        metrics: DrafterMetrics,
        *,
        max_unsent: int,
        on_lost: Callable[[int], None],
        pin: Callable[[NDArray[np.uint8]], bool],
        replicas: ReplicaTable | None = None,
    ) -> None:
        """`max_unsent` bounds the answers that wait for a verifier that does not read; `pin` pins
        memory for the device that copies features from it. `replicas`: of verifiers that exchange
        between devices; None: there can be none."""
        # Features go from there to where the device reads them.
        super().__init__(on_lost, borrows=True)
        self._metrics = metrics
        self._max_unsent = max_unsent
        self._pin = pin
        self._replicas = replicas

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
                    self._handle_replica(connection, message)
                elif not isinstance(message, Heartbeat | Welcome | EncodedMessage):
                    found.append((connection, message))
        return found

    def detach_channel(self, number: int) -> None:
        """See `ShmChannelSet`."""
        if self._replicas is not None:
            self._replicas.close(number)
        super().detach_channel(number)

    def _handle_replica(self, connection: int, command: ReplicaCommand) -> None:
        """Do what a verifier says of its replica. One that cannot go on ends the connection: the
        verifier is dialled anew, and makes a new offer."""
        if not isinstance(command, ReplicaOffer):
            try:
                if self._replicas is None or self._replicas.handle_command(connection, command):
                    return
                why = "the replica has missed a round"
            except OutriderError as error:
                why = error.message
            self.drop_channel(connection, why)
            return
        descriptor = self.take_descriptor(connection)
        if self._replicas is None:
            if descriptor is not None:
                os.close(descriptor)
            answer: ReplicaAnswer = ReplicaRefused(reason="this drafter has no replicas")
        else:
            answer, shared = self._replicas.make_replica(connection, command, descriptor)
            if shared is not None:
                self.send_descriptor(connection, shared)
                os.close(shared)
        self.send_frames(connection, encode_drafter_message(answer))
