"""Frames of bytes over a stream socket: four bytes of length, then the content."""

from __future__ import annotations

import socket
from typing import Final

MAX_FRAME_BYTES: Final = 1 << 30
_LENGTH_BYTES: Final = 4


def write_frame(connection: socket.socket, content: bytes) -> None:
    """Send `content` as one frame. Raises OSError if the connection fails."""
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES, "big") + content)


def read_frame(connection: socket.socket) -> bytes:
    """Receive one frame and return its content. Raises OSError if the connection fails, and
    EOFError if the stream ends before the frame is complete or the frame is too large."""
    size = int.from_bytes(_read(connection, _LENGTH_BYTES), "big")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    return _read(connection, size)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the stream ended within a frame")
        parts += part
    return bytes(parts)
