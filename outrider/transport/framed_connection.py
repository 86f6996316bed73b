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
        """Queue a frame; waits while the peer is not reading. Raises ConnectionLostError."""
        ...

    def try_send(self, *frames: bytes) -> bool:
        """Queue frames, all of them if there is room for one now, else none. Raises
        ConnectionLostError."""
        ...

    async def receive(self) -> bytes | memoryview:
        """The next frame; raises the error that ended the stream."""
        ...

    def receive_ready(self) -> Sequence[bytes | memoryview]:
        """The frames that `receive` would give without waiting; never raises."""
        ...

    async def close(self) -> None:
        """Send what is queued (within a bound), then end both directions; idempotent."""
        ...


class FramedConnection(Generic[SendT, ReceiveT]):
    """A connection that encodes to frames and decodes from them: messages offered together cross as
    one frame, unless that is too large."""

    def __init__(
        self,
        frames: FrameStream,
        encode: Callable[[Sequence[SendT]], Sequence[bytes]],
        decode: Callable[[bytes | memoryview], Sequence[ReceiveT | InvalidMessageError]],
    ) -> None:
        """`encode` gives frames in order; `decode` the error in place of a malformed message."""
        self.frames = frames
        self._encode = encode
        self._decode = decode
        self._unread: deque[ReceiveT | InvalidMessageError] = deque()

    @property
    def peer(self) -> str:
        """Address of the other end."""
        return self.frames.peer

    async def send(self, message: SendT) -> None:
        """Queue a message."""
        (frame,) = self._encode((message,))
        await self.frames.send(frame)

    def try_send(self, *messages: SendT) -> bool:
        """Queue messages if there is room now."""
        return self.frames.try_send(*self._encode(messages))

    async def receive(self) -> ReceiveT:
        """The next message; InvalidMessageError costs that message only."""
        while not self._unread:
            self._unread.extend(self._decode(await self.frames.receive()))
        message = self._unread.popleft()
        if isinstance(message, InvalidMessageError):
            raise message
        return message

    def receive_ready(self) -> list[ReceiveT]:
        """The messages that have arrived, up to the first malformed one."""
        for frame in self.frames.receive_ready():
            self._unread.extend(self._decode(frame))
        messages: list[ReceiveT] = []
        while self._unread and not isinstance(message := self._unread[0], InvalidMessageError):
            messages.append(message)
            self._unread.popleft()
        return messages

    async def close(self) -> None:
        """Close both directions; what is unread is dropped."""
        self._unread.clear()
        await self.frames.close()


def verifier_end(
    frames: FrameStream, heartbeat: HeartbeatConfig, *, bundle_bytes: int = MAX_BUNDLE_BYTES
) -> VerifierConnection:
    """The verifier's end of an exchange over frames."""
    encode = partial(encode_verifier_messages, max_bytes=bundle_bytes)
    return with_heartbeat(FramedConnection(frames, encode, decode_drafter_messages), heartbeat)


def drafter_end(
    frames: FrameStream, heartbeat: HeartbeatConfig, *, bundle_bytes: int = MAX_BUNDLE_BYTES
) -> DrafterConnection:
    """The drafter's end of an exchange over frames."""
    encode = partial(encode_drafter_messages, max_bytes=bundle_bytes)
    return with_heartbeat(FramedConnection(frames, encode, decode_verifier_messages), heartbeat)


def router_end(frames: FrameStream, heartbeat: HeartbeatConfig) -> RouterConnection:
    """A router's end of a stream of sessions over frames."""
    encode = partial(_each, encode_sessions_request)
    decode = partial(_alone, decode_sessions_message)
    return with_heartbeat(FramedConnection(frames, encode, decode), heartbeat)


def serving_end(frames: FrameStream, heartbeat: HeartbeatConfig) -> ServingConnection:
    """The verifier's end of a stream of sessions over frames."""
    encode = partial(_each, encode_sessions_message)
    decode = partial(_alone, decode_sessions_request)
    return with_heartbeat(FramedConnection(frames, encode, decode), heartbeat)


def _each(encode: Callable[[SendT], bytes], messages: Sequence[SendT]) -> list[bytes]:
    """A frame for every message: those of a round are one message already."""
    return [encode(message) for message in messages]


def _alone(
    decode: Callable[[bytes | memoryview], ReceiveT], frame: bytes | memoryview
) -> tuple[ReceiveT | InvalidMessageError]:
    try:
        return (decode(frame),)
    except InvalidMessageError as error:
        return (error,)
