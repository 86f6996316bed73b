"""Connections made of frames: the codec half that all transports share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from outrider.transport.base import DrafterConnection, VerifierConnection
from outrider.transport.heartbeat import HeartbeatConfig, with_heartbeat
from outrider.wire.codec import (
    decode_drafter_message,
    decode_verifier_message,
    encode_drafter_message,
    encode_verifier_message,
)

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class Frames(Protocol):
    """An ordered, bounded, bidirectional stream of byte strings."""

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    async def send(self, frame: bytes, /) -> None:
        """Queue a frame; waits while the peer is not reading. Raises ConnectionLostError."""
        ...

    def offer(self, frame: bytes, /) -> bool:
        """Queue a frame if there is room now. Raises ConnectionLostError."""
        ...

    async def receive(self) -> bytes | memoryview:
        """The next frame; raises the error that ended the stream."""
        ...

    async def close(self) -> None:
        """Send what is queued (within a bound), then end both directions; idempotent."""
        ...


class FramedConnection(Generic[SendT, ReceiveT]):
    """A connection that encodes to frames and decodes from them."""

    def __init__(
        self,
        frames: Frames,
        encode: Callable[[SendT], bytes],
        decode: Callable[[bytes | memoryview], ReceiveT],
    ) -> None:
        self.frames = frames
        self._encode = encode
        self._decode = decode

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self.frames.peer

    async def send(self, message: SendT) -> None:
        """Queue a message."""
        await self.frames.send(self._encode(message))

    def offer(self, message: SendT) -> bool:
        """Queue a message if there is room now."""
        return self.frames.offer(self._encode(message))

    async def receive(self) -> ReceiveT:
        """The next message; InvalidMessageError costs that frame only."""
        return self._decode(await self.frames.receive())

    async def close(self) -> None:
        """Close both directions."""
        await self.frames.close()


def verifier_end(frames: Frames, heartbeat: HeartbeatConfig) -> VerifierConnection:
    """The verifier's end of an exchange over frames."""
    return with_heartbeat(
        FramedConnection(frames, encode_verifier_message, decode_drafter_message), heartbeat
    )


def drafter_end(frames: Frames, heartbeat: HeartbeatConfig) -> DrafterConnection:
    """The drafter's end of an exchange over frames."""
    return with_heartbeat(
        FramedConnection(frames, encode_drafter_message, decode_verifier_message), heartbeat
    )
