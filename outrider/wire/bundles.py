"""Message bundles: several encoded messages in one frame, joined and split without parsing.

A frame contains either one message or a bundle, which is a repeated field of messages of the
frame's own type (see proto/README.md). Joining and splitting read only the tags and lengths of a
frame's outermost fields and build no protobuf objects. The reader of a bundle can therefore drop a
malformed message and keep the others. A bundle inside a bundle is refused before it is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.wire.checks import raise_invalid
from outrider.wire.limits import MAX_BUNDLE_BYTES, MAX_BUNDLE_MESSAGES, MAX_MESSAGE_BYTES
from outrider.wire.v1 import exchange_pb2 as pb

Encoded = bytes | memoryview

_BUNDLE = pb.ExchangeRequest.BUNDLE_FIELD_NUMBER
LENGTH_DELIMITED = 2
"""Protobuf wire type of submessages and bytes."""
_FIXED_BYTES = {1: 8, 5: 4}
_TAG = bytes([_BUNDLE << 3 | LENGTH_DELIMITED])
_MAX_VARINT_BYTES = 10
_SHORT = [bytes([value]) for value in range(0x80)]
"""Encoded varints of the numbers 0 to 127, indexed by number. Each takes one byte."""
_MAX_OTHER_FIELDS = 64
"""Maximum number of fields of a frame apart from bundled messages. A frame with one message has one
such field; newer peers may add fields that this version does not know."""


def join_messages(messages: Sequence[bytes], *, max_bytes: int = MAX_BUNDLE_BYTES) -> list[bytes]:
    """Join encoded messages into frames of at most `max_bytes`, in order.

    A message that is larger than `max_bytes` gets a frame of its own. A frame with only one message
    is that message itself, without a bundle.
    """
    frames: list[bytes] = []
    group: list[bytes] = []
    size = 0
    for message in messages:
        # Eight bytes are an upper bound for the tag and the length.
        needs = len(message) + 8
        if group and (size + needs > max_bytes or len(group) == MAX_BUNDLE_MESSAGES):
            frames.append(_frame(group))
            group, size = [], 0
        group.append(message)
        size += needs
    if group:
        frames.append(_frame(group))
    return frames


def split_frame(frame: Encoded) -> Sequence[Encoded]:
    """Split a frame into the encoded messages of its bundle. Returns the frame itself if it has no
    bundle.

    Raises InvalidMessageError for a frame that is not a sequence of protobuf fields, that has both
    a bundle and a message, or that exceeds a limit. The messages themselves are not checked.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise_invalid(f"a frame of {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    members: list[Encoded] = []
    others: list[int] = []
    for number, content in parse_fields(memoryview(frame)):
        if number == _BUNDLE:
            if not isinstance(content, memoryview):
                raise_invalid("a bundle must hold messages")
            members.append(content)
        else:
            others.append(number)
        if len(members) > MAX_BUNDLE_MESSAGES:
            raise_invalid(f"a bundle must have at most {MAX_BUNDLE_MESSAGES} messages")
        if len(others) > _MAX_OTHER_FIELDS:
            raise_invalid(f"a frame must have at most {_MAX_OTHER_FIELDS} fields")
    if not members:
        return (frame,)
    # Messages have field numbers below the bundle's; newer peers add other fields above it
    # (proto/README.md).
    if any(number < _BUNDLE for number in others):
        raise_invalid("a frame must hold a message or a bundle, not both")
    return members


def refuse_bundle(message: Encoded) -> None:
    """Raise InvalidMessageError if an encoded message contains a bundle. The message is not
    parsed."""
    if split_frame(message)[0] is not message:
        raise_invalid("a bundle must not hold bundles")


def _frame(group: Sequence[bytes]) -> bytes:
    if len(group) == 1:
        return group[0]
    parts: list[bytes] = []
    for message in group:
        parts += (_TAG, encode_varint(len(message)), message)
    return b"".join(parts)


def encode_varint(value: int) -> bytes:
    """Encode a number >= 0 as a protobuf varint."""
    if value < len(_SHORT):
        return _SHORT[value]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def parse_fields(data: memoryview) -> Iterator[tuple[int, memoryview | int | None]]:
    """Yield (field number, content) for every outermost field of an encoded message.

    The content of a length-delimited field is a view of `data`, that of a varint is its value, and
    that of a fixed-width field is None. Raises InvalidMessageError if `data` is not a sequence of
    fields.
    """
    position, end = 0, len(data)
    while position < end:
        tag, position = read_varint(data, position)
        number, kind = tag >> 3, tag & 7
        content: memoryview | int | None = None
        if kind == LENGTH_DELIMITED:
            length, start = read_varint(data, position)
            position = start + length
            content = data[start:position]
        elif kind == 0:
            content, position = read_varint(data, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise_invalid(f"wire type {kind} is not used")
        if position > end or number == 0:
            raise_invalid(f"{end} bytes are not a sequence of fields")
        yield number, content


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read the varint at `position` and return (value, position after it).

    Raises InvalidMessageError if the varint is incomplete.
    """
    if position < len(data) and (byte := data[position]) < 0x80:
        return byte, position + 1
    value = shift = 0
    for byte in data[position : position + _MAX_VARINT_BYTES]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise_invalid("a field is cut short")
