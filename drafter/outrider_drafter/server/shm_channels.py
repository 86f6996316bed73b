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
"""Seconds between two checks whether replicas have work to do."""


class ReplicaTable(Protocol):
    """Draft replicas for verifiers that exchange data directly between GPUs, at most one for each
    connection.

    `outrider_drafter.gpu.replicas.Replicas` implements this protocol; it is not imported here
    because it needs Triton. No method blocks.
    """

    @property
    def has_work(self) -> bool:
        """Whether `run_waiting` or `build_step` may have something to do."""
        ...

    def take_offer(
        self, connection: int, offer: ReplicaOffer, descriptor: int | None
    ) -> ReplicaRefused | None:
        """Examine a verifier's offer of a replica. Return a refusal, or None if the replica is
        going to be built, in which case `build_step` returns the answer later. `descriptor`: file
        descriptor of the verifier's memory; this method closes it."""
        ...

    def build_step(self) -> tuple[int, ReplicaAnswer, int | None] | None:
        """Do one step of building a replica. When the replica is built or has failed, return its
        connection, the answer for the verifier, and the file descriptor of the replica's shared
        memory (None after a failure). Return None otherwise. The caller closes the descriptor."""
        ...

    def handle_command(self, connection: int, command: ReplicaCommand) -> None:
        """Execute a verifier's command for its replica now, or let `run_waiting` execute it later
        if it would block the thread. Raises InvalidMessageError if the command is invalid or the
        replica has missed a round."""
        ...

    def run_waiting(self) -> list[tuple[int, str]]:
        """Execute the waiting commands that can run now without blocking the thread. Return a
        (connection, reason) pair for each replica that has failed."""
        ...

    def close(self, connection: int) -> None:
        """Free the replica of a connection that has ended."""


class VerifierShmChannels(ShmChannelSet):
    """Shared-memory channels to verifiers, at most one for each connection. Used by the drafting
    thread only."""

    def __init__(
        self,
        metrics: DrafterMetrics,
        *,
        max_unsent: int,
        on_lost: Callable[[int], None],
        pin: Callable[[NDArray[np.uint8]], bool],
        replicas: ReplicaTable | None = None,
    ) -> None:
        """Create a set without channels.

        `max_unsent`: maximum number of messages that wait for a verifier that does not read; beyond
        it the oldest are dropped. `on_lost`: called with the connection whose channel is lost.
        `pin`: pins host memory so that the device can copy features from it. `replicas`: replicas
        for verifiers that exchange data directly between GPUs, or None if this drafter offers none.
        """
        # Messages are read in place, so that the device can copy features from the ring.
        super().__init__(on_lost, borrows=True)
        self._metrics = metrics
        self._max_unsent = max_unsent
        self._pin = pin
        self._replicas = replicas

    def attach_channel(self, number: int, shm_channel: ShmChannel) -> None:
        """Add the channel of a connection and pin its memory; see `ShmChannelSet`."""
        shm_channel.pin_for_reader(self._pin)
        super().attach_channel(number, shm_channel)

    def send_answers(self, answers: OutgoingProposals) -> OutgoingProposals:
        """Send those of the messages whose connections have a shared-memory channel. Return the
        remaining messages."""
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
        """Return the received (connection, message) pairs of the shared-memory channels whose
        descriptors are in `ready`. Commands for replicas are executed here and not returned."""
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
        """Remove the channel of a connection and close its replica; see `ShmChannelSet`."""
        if self._replicas is not None:
            self._replicas.close(number)
        super().detach_channel(number)

    def poll_timeout(self, timeout_s: float | None) -> float | None:
        """Return the time in seconds to wait for messages, or None to wait without limit; see
        `ShmChannelSet`. While a replica has work the wait is short, because nothing signals when a
        replica can continue."""
        timeout_s = super().poll_timeout(timeout_s)
        if self._replicas is None or not self._replicas.has_work:
            return timeout_s
        return _REPLICA_POLL_S if timeout_s is None else min(timeout_s, _REPLICA_POLL_S)

    def run_replicas(self) -> None:
        """Execute the waiting commands of all replicas. If a replica fails, its connection is
        closed."""
        if self._replicas is not None:
            for connection, why in self._replicas.run_waiting():
                self._lose_replica(connection, why)

    def build_replica(self) -> None:
        """Do one step of building a replica if a verifier waits for one."""
        if self._replicas is None:
            return
        built = self._replicas.build_step()
        if built is not None:
            self._answer(*built)

    def _handle_replica(self, connection: int, command: ReplicaCommand) -> None:
        """Execute a verifier's command for its replica, or take up its offer of one."""
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
        """End the connection of a replica that has failed. The drafter then reconnects to the
        verifier, which makes a new offer."""
        assert self._replicas is not None
        self._replicas.close(connection)
        self.drop_channel(connection, why)
