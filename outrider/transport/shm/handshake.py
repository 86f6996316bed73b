"""Handshake of a shared-memory channel: one process listens, the other joins with a token.

The listener's socket is in the abstract namespace (Linux): it has no file, belongs to the network
namespace, and ends with its process. The joining process must run as the same user and know the
token, which was sent over the exchange connection. The listener then sends the file descriptors of
both rings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Final

from outrider.errors import UnavailableError
from outrider.transport.shm.channel import ShmChannel
from outrider.transport.shm.ring_buffer import RingBuffer
from outrider.wire.messages import ShmOffer

ShmChannelJoiner = Callable[[ShmOffer], ShmChannel]
"""Function that joins the shared-memory channel that a peer offers, such as `join_channel`."""

_TOKEN_BYTES: Final = 16
_JOIN_S: Final = 2.0
"""Seconds for which either side waits for the other."""
_MAX_STRANGERS: Final = 32
"""Maximum number of connections that have not sent a token yet."""
_WELCOME: Final = b"\1"
_CREDENTIALS: Final = struct.Struct("3i")


def is_shm_supported() -> bool:
    """Return whether this system supports shared-memory channels."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def _address(name: str) -> str:
    return f"\0outrider-{name}"


class ShmListener:
    """Accepts peers that were offered a shared-memory channel, on the running event loop."""

    def __init__(self) -> None:
        """Listen on a new socket. Raises OSError if the system has no such sockets."""
        self._name = secrets.token_hex(_TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(_address(self._name))
        self._socket.listen()
        self._expected: dict[bytes, asyncio.Future[ShmChannel]] = {}
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._accept)

    @classmethod
    def open(cls) -> ShmListener | None:
        """Return a listener, or None if this system does not support shared-memory channels."""
        if not is_shm_supported():
            return None
        try:
            return cls()
        except OSError:
            return None

    def make_offer(self) -> ShmOffer:
        """Offer a shared-memory channel to one peer. Use `wait_joined` to wait for the peer, or
        `withdraw_offer` to drop the offer."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._expected[token] = self._loop.create_future()
        return ShmOffer(name=self._name, token=token)

    async def wait_joined(self, offer: ShmOffer) -> ShmChannel:
        """Wait until a peer has joined the offered channel, and return this end of the channel.
        Raises UnavailableError (SHM_NOT_JOINED) if no peer joins in time."""
        waiting = self._expected.get(offer.token)
        if waiting is None:
            raise UnavailableError(
                "the shared-memory channel is not offered any more", reason="SHM_NOT_JOINED"
            )
        try:
            async with asyncio.timeout(_JOIN_S):
                return await waiting
        except TimeoutError:
            raise UnavailableError(
                "nobody joined the shared-memory channel", reason="SHM_NOT_JOINED"
            ) from None
        finally:
            self._expected.pop(offer.token, None)

    def withdraw_offer(self, offer: ShmOffer) -> None:
        """Withdraw an offer and close its shared-memory channel if a peer has already joined.
        Idempotent."""
        self._forget_offer(offer.token)

    def _forget_offer(self, token: bytes) -> None:
        waiting = self._expected.pop(token, None)
        if waiting is not None and waiting.done() and not waiting.cancelled():
            waiting.result().close()

    def close(self) -> None:
        """Stop listening and withdraw all offers; idempotent."""
        for token in list(self._expected):
            self._forget_offer(token)
        for stranger in list(self._strangers):
            self._forget(stranger).close()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        try:
            stranger, _ = self._socket.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS or _user_of(stranger) != os.getuid():
            stranger.close()
            return
        stranger.setblocking(False)
        self._strangers[stranger] = self._loop.call_later(_JOIN_S, self._give_up, stranger)
        self._loop.add_reader(stranger, self._accept_peer, stranger)

    def _forget(self, stranger: socket.socket) -> socket.socket:
        self._strangers.pop(stranger).cancel()
        self._loop.remove_reader(stranger)
        return stranger

    def _give_up(self, stranger: socket.socket) -> None:
        self._forget(stranger).close()

    def _accept_peer(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        try:
            token = stranger.recv(_TOKEN_BYTES + 1)
            waiting = self._expected.get(token)
            if waiting is None or waiting.done():
                stranger.close()
                return
            waiting.set_result(_make_shm_channel(stranger))
        except OSError:
            stranger.close()


def _user_of(connected: socket.socket) -> int:
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def make_channel_pair() -> tuple[ShmChannel, ShmChannel]:
    """Return both ends of a shared-memory channel within one process, for benchmarks and tests.
    Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine = _make_shm_channel(ours)
    return mine, _welcomed(theirs)


def _make_shm_channel(connected: socket.socket) -> ShmChannel:
    """Create both rings, send them to the peer, and return the listener's end. Raises OSError."""
    descriptors: list[int] = []
    try:
        descriptors += [RingBuffer.create_memory(), RingBuffer.create_memory()]
        rings = [RingBuffer.from_descriptor(descriptor) for descriptor in descriptors]
        socket.send_fds(connected, [_WELCOME], descriptors)
    finally:
        _close_all(descriptors)
    return ShmChannel(connected, outgoing=rings[0], incoming=rings[1])


def join_channel(offer: ShmOffer) -> ShmChannel:
    """Join the shared-memory channel that a peer offers, and return this end. Blocks for a few
    seconds at most. Raises UnavailableError if the channel cannot be joined, for example because
    the peer is on another host, and InvalidMessageError if the peer sends invalid memory."""
    with _joining() as connected:
        connected.settimeout(_JOIN_S)
        _ask(connected, offer)
        return _welcomed(connected)


async def join_channel_async(offer: ShmOffer) -> ShmChannel:
    """Join the shared-memory channel that a peer offers, as `join_channel` does, but without
    blocking the event loop, even if the peer is slow or never answers."""
    with _joining() as connected:
        connected.setblocking(False)
        _ask(connected, offer)
        await _readable(connected)
        return _welcomed(connected)


@contextlib.contextmanager
def _joining() -> Iterator[socket.socket]:
    """Yield a socket for joining, which is closed if joining fails. Converts OSError to
    UnavailableError."""
    if not is_shm_supported():
        raise UnavailableError(
            "this system has no shared-memory channels", reason="NO_SHARED_MEMORY"
        )
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        yield connected
    except OSError as error:
        connected.close()
        raise UnavailableError(
            f"no shared-memory channel: {error}", reason="NO_SHM_CHANNEL"
        ) from None
    except BaseException:
        connected.close()
        raise


def _ask(connected: socket.socket, offer: ShmOffer) -> None:
    connected.connect(_address(offer.name))
    connected.send(offer.token)


async def _readable(connected: socket.socket) -> None:
    """Wait until the socket can be read. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    there = asyncio.Event()
    loop.add_reader(connected, there.set)
    try:
        async with asyncio.timeout(_JOIN_S):
            await there.wait()
    finally:
        loop.remove_reader(connected)


def _welcomed(connected: socket.socket) -> ShmChannel:
    """Receive both rings from the listener and return the joining end. Raises OSError,
    UnavailableError or InvalidMessageError."""
    descriptors: list[int] = []
    try:
        answer, descriptors, _, _ = socket.recv_fds(connected, len(_WELCOME), 2)
        if answer != _WELCOME or len(descriptors) != 2:
            raise UnavailableError("the shared-memory channel was refused", reason="SHM_REFUSED")
        incoming, outgoing = [RingBuffer.from_descriptor(descriptor) for descriptor in descriptors]
        return ShmChannel(connected, outgoing=outgoing, incoming=incoming)
    finally:
        _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
