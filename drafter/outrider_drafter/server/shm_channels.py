"""Shared-memory channels to verifiers on the same host, read and written by the drafting thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Final, Protocol

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


_REPLICA_POLL_S: Final = 0.0001
"""Time between two looks at what replicas have to do."""


class ReplicaTable(Protocol):
    """Replicas by connection: `outrider_drafter.gpu.replicas.Replicas`, which imports Triton.
    Nothing waits."""

    @property
    def has_work(self) -> bool:
        """Whether `run_waiting` or `build_step` may have something to do."""
        ...

    def take_offer(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> ReplicaRefused | None:
        """Take an offer up; None: the answer comes by `build_step`."""
        ...

    def build_step(self) -> tuple[int, ReplicaAnswer, int | None] | None:
        """Do a step of building a replica; a connection's answer and the descriptor that goes with
        it, which is the caller's to close."""
        ...

    def handle_command(self, connection: int, command: ReplicaCommand) -> None:
        """Do what a verifier says of its replica. Raises InvalidMessageError."""
        ...

    def run_waiting(self) -> list[tuple[int, str]]:
        """Do what could not be done before; the connections whose replicas do not go on, and
        why."""
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

    def poll_timeout(self, timeout_s: float | None) -> float | None:
        """See `ShmChannelSet`; nobody says when a replica can go on."""
        timeout_s = super().poll_timeout(timeout_s)
        if self._replicas is None or not self._replicas.has_work:
            return timeout_s
        return _REPLICA_POLL_S if timeout_s is None else min(timeout_s, _REPLICA_POLL_S)

    def run_replicas(self) -> None:
        """Have replicas do what they could not do before."""
        if self._replicas is not None:
            for connection, why in self._replicas.run_waiting():
                self._lose_replica(connection, why)

    def build_replica(self) -> None:
        """Do a step of building a replica, if a verifier waits for one."""
        if self._replicas is None:
            return
        built = self._replicas.build_step()
        if built is not None:
            self._answer(*built)

    def _handle_replica(self, connection: int, command: ReplicaCommand) -> None:
        """Do what a verifier says of its replica."""
        if not isinstance(command, ReplicaOffer):
            if self._replicas is not None:
                try:
                    self._replicas.handle_command(connection, command)
                except OutriderError as error:
                    self._lose_replica(connection, error.message)
            return
        descriptor = self.take_descriptor(connection)
        if self._replicas is not None:
            refused = self._replicas.take_offer(connection, command, descriptor)
        else:
            refused = ReplicaRefused(reason="this drafter has no replicas")
            if descriptor is not None:
                os.close(descriptor)
        if refused is not None:
            self._answer(connection, refused, None)

    def _answer(self, connection: int, answer: ReplicaAnswer, descriptor: int | None) -> None:
        if descriptor is not None:
            self.send_descriptor(connection, descriptor)
            os.close(descriptor)
        self.send_frames(connection, encode_drafter_message(answer))

    def _lose_replica(self, connection: int, why: str) -> None:
        """End the connection of a replica that cannot go on: the verifier is dialled anew, and
        makes a new offer."""
        assert self._replicas is not None
        self._replicas.close(connection)
        self.drop_channel(connection, why)
