"""Connections over frames: batching, encoding and decoding shared by all transports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from outrider.errors import InvalidMessageError
from outrider.transport.heartbeat import HeartbeatConfig, with_heartbeat
from outrider.transport.interface import (
    DrafterConnection,
    RouterConnection,
    ServingConnection,
    VerifierConnection,
)
from outrider.wire.codec import (
    decode_drafter_messages,
    decode_sessions_message,
    decode_sessions_request,
    decode_verifier_messages,
    encode_drafter_messages,
    encode_sessions_message,
    encode_sessions_request,
    encode_verifier_messages,
)
from outrider.wire.limits import MAX_BUNDLE_BYTES

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class FrameStream(Protocol):
    """An ordered, bounded, bidirectional stream of byte strings."""

    @property
    def peer(self) -> str:
        """Address of the other end, for logs."""
        ...

    async def send(self, frame: bytes, /) -> None:
        """Wait until the queue has space, then queue a frame. Raises ConnectionLostError."""
        ...

    def try_send(self, *frames: bytes) -> bool:
        """Queue all frames and return True if the first one fits into the queue now. Otherwise
        queue none and return False. Raises ConnectionLostError.
        """
        ...

    async def receive(self) -> bytes | memoryview:
        """Return the next frame. Raises the error that ended the stream."""
        ...

    def receive_ready(self) -> Sequence[bytes | memoryview]:
        """Return the frames that have arrived, without waiting. Never raises."""
        ...

    async def close(self) -> None:
        """Send queued frames within a time limit, then end both directions. Idempotent."""
        ...


class FramedConnection(Generic[SendT, ReceiveT]):
    """A connection that sends and receives messages as frames. Messages that are sent together
    share one frame, unless it would be too large.
    """

    def __init__(
        self,
        frames: FrameStream,
        encode: Callable[[Sequence[SendT]], Sequence[bytes]],
        decode: Callable[[bytes | memoryview], Sequence[ReceiveT | InvalidMessageError]],
    ) -> None:
        """Create a connection over `frames`. `encode` converts messages to frames, in the same
        order. `decode` converts a frame to messages, and returns an InvalidMessageError in place of
        each malformed message.
        """
        self.frames = frames
        self._encode = encode
        self._decode = decode
        self._unread: deque[ReceiveT | InvalidMessageError] = deque()

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self.frames.peer

    async def send(self, message: SendT) -> None:
        """Wait until the queue has space, then queue a message."""
        (frame,) = self._encode((message,))
        await self.frames.send(frame)

    def try_send(self, *messages: SendT) -> bool:
        """Queue all messages and return True. If the queue is full, queue none and return False."""
        return self.frames.try_send(*self._encode(messages))

    async def receive(self) -> ReceiveT:
        """Return the next message. Raises InvalidMessageError if it is malformed; later messages
        can still be received.
        """
        while not self._unread:
            self._unread.extend(self._decode(await self.frames.receive()))
        message = self._unread.popleft()
        if isinstance(message, InvalidMessageError):
            raise message
        return message

    def receive_ready(self) -> list[ReceiveT]:
        """Return the messages that have arrived before the first malformed one, without waiting.
        The next `receive` raises the error of the malformed one.
        """
        for frame in self.frames.receive_ready():
            self._unread.extend(self._decode(frame))
        messages: list[ReceiveT] = []
        while self._unread and not isinstance(message := self._unread[0], InvalidMessageError):
            messages.append(message)
            self._unread.popleft()
        return messages

    async def close(self) -> None:
        """Close both directions. Unread messages are dropped."""
        self._unread.clear()
        await self.frames.close()


def verifier_end(
    frames: FrameStream, heartbeat: HeartbeatConfig, *, bundle_bytes: int = MAX_BUNDLE_BYTES
) -> VerifierConnection:
    """Return the verifier's end of an exchange that is transported by `frames`, with heartbeats.
    Messages are joined into frames of up to `bundle_bytes`.
    """
    encode = partial(encode_verifier_messages, max_bytes=bundle_bytes)
    return with_heartbeat(FramedConnection(frames, encode, decode_drafter_messages), heartbeat)


def drafter_end(
    frames: FrameStream, heartbeat: HeartbeatConfig, *, bundle_bytes: int = MAX_BUNDLE_BYTES
) -> DrafterConnection:
    """Return the drafter's end of an exchange that is transported by `frames`, with heartbeats.
    Messages are joined into frames of up to `bundle_bytes`.
    """
    encode = partial(encode_drafter_messages, max_bytes=bundle_bytes)
    return with_heartbeat(FramedConnection(frames, encode, decode_verifier_messages), heartbeat)


def router_end(frames: FrameStream, heartbeat: HeartbeatConfig) -> RouterConnection:
    """Return a router's end of a session stream over `frames`, with heartbeats."""
    encode = partial(_each, encode_sessions_request)
    decode = partial(_alone, decode_sessions_message)
    return with_heartbeat(FramedConnection(frames, encode, decode), heartbeat)


def serving_end(frames: FrameStream, heartbeat: HeartbeatConfig) -> ServingConnection:
    """Return the verifier's end of a session stream that is transported by `frames`, with
    heartbeats.
    """
    encode = partial(_each, encode_sessions_message)
    decode = partial(_alone, decode_sessions_request)
    return with_heartbeat(FramedConnection(frames, encode, decode), heartbeat)


def _each(encode: Callable[[SendT], bytes], messages: Sequence[SendT]) -> list[bytes]:
    """Encode each message as one frame. All rows of a round are already one message."""
    return [encode(message) for message in messages]


def _alone(
    decode: Callable[[bytes | memoryview], ReceiveT], frame: bytes | memoryview
) -> tuple[ReceiveT | InvalidMessageError]:
    try:
        return (decode(frame),)
    except InvalidMessageError as error:
        return (error,)
