"""Shared-memory channels to drafters on the same host, read and written by the engine thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidMessageError
from outrider.transport.shm import MAX_INLINE_BYTES, Frame, ShmChannel, ShmChannelSet
from outrider.wire.codec import decode_drafter_messages, encode_verifier_messages
from outrider.wire.messages import EncodedMessage, VerifierMessage
from outrider_verifier.exchange.message_checks import DrafterMessageChecker
from outrider_verifier.state.commands import Command, ExchangeLink, MalformedMessage


class DrafterShmChannels(ShmChannelSet):
    """Shared-memory channels of the attached drafters, indexed by link id.

    Used on the engine thread only, but any thread may read `counters`.
    """

    def __init__(
        self,
        checks: DrafterMessageChecker,
        *,
        queue_bytes: int,
        on_lost: Callable[[int], None],
        pin: Callable[[NDArray[np.uint8]], bool],
    ) -> None:
        """Create a set without channels. A drafter with more than `queue_bytes` unsent bytes is
        disconnected. `pin` is `ModelRunner.pin_memory`."""
        super().__init__(on_lost)
        self._pin = pin
        self._checks = checks
        self._queue_bytes = queue_bytes
        self.counters: Counter[str] = checks.counters

    def attach_drafter(self, link: ExchangeLink, shm_channel: ShmChannel) -> None:
        """Register the shared-memory channel of a drafter. All further messages to the drafter use
        it.

        If the drafter can read features from shared memory, rounds may reserve space for features
        in the channel.
        """
        if link.reads_shm_features:
            shm_channel.allow_reservations(self._pin)
        self.attach_channel(link.link_id, shm_channel)

    def send_messages(self, link_id: int, messages: Sequence[VerifierMessage]) -> None:
        """Send several messages to a drafter. Drop its channel if more than `queue_bytes` bytes are
        unsent afterwards."""
        shm_channel = self.send_frames(link_id, *_frames(messages))
        if shm_channel is not None and shm_channel.unsent_bytes > self._queue_bytes:
            self.counters["drafters_overflowed"] += 1
            self.drop_channel(link_id, "the drafter does not read")

    def receive_commands(self, ready: Iterable[int]) -> list[Command]:
        """Receive messages on the channels whose file descriptors are in `ready`. Return the engine
        commands that they contain."""
        found: list[Command] = []
        for link_id, frame in self.receive(ready):
            for message in decode_drafter_messages(frame):
                if isinstance(message, InvalidMessageError):
                    self._checks.count_invalid(message)
                    found.append(MalformedMessage(link_id))
                    continue
                command = self._checks.to_command(link_id, message)
                if command is not None:
                    found.append(command)
        return found


def _frames(messages: Sequence[VerifierMessage]) -> list[Frame]:
    """Encode messages as frames. Small messages are joined; each large encoded one is a frame."""
    frames: list[Frame] = []
    together: list[VerifierMessage] = []
    for message in messages:
        if isinstance(message, EncodedMessage) and message.nbytes > MAX_INLINE_BYTES:
            frames += (*encode_verifier_messages(together), message)
            together = []
        else:
            together.append(message)
    frames += encode_verifier_messages(together)
    return frames
