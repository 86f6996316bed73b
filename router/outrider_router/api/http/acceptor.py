"""Acceptor of an HTTP port: counts connections before TLS and sets them up one at a time.

The TLS handshake has a time limit. One connection is set up per iteration of the event loop, so
that a burst of connections does not block the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable
from typing import Final

from outrider_router.admission.queue import ArrivalQueue
from outrider_router.api.http.connection_slots import ConnectionSlots, SlotHolder

REFUSAL_TIMEOUT_S: Final = 1.0
"""Time in seconds that a connection without a slot gets to send its request and receive a
refusal.
"""
_RETRY_S: Final = 0.05
"""Time in seconds until the next attempt after the process ran out of file descriptors."""
_MAX_ACCEPTS: Final = 256
"""Largest number of connections that are accepted in one iteration of the event loop; they take
about 20 ms.
"""
_PEEKED_BYTES: Final = 256


class AcceptedConnection:
    """One connection from the moment it is accepted until it is closed."""

    def __init__(self, sock: socket.socket, places: ConnectionSlots) -> None:
        self._sock = sock
        self._places = places
        self._connection: SlotHolder | None = None
        """Protocol that serves the connection; None before the end of the TLS handshake."""
        self.is_cut = False
        self.is_refused = False
        """Whether the connection has no slot and only receives a refusal."""

    def acquire_slot(self) -> bool:
        """Acquire a slot. If none is free, acquire permission to receive an error response without
        a slot. Return False if neither is available.
        """
        if self._places.acquire_slot(self):
            return True
        self.is_refused = self._places.record_refusal()
        return self.is_refused

    @property
    def is_served(self) -> bool:
        """Whether the TLS handshake is done and a protocol serves the connection."""
        return self._connection is not None

    def begin_serving(self, connection: SlotHolder) -> None:
        """Set the protocol that serves the connection from now on. `is_sent` and `close_now` are
        forwarded to it.
        """
        self._connection = connection

    def release_slot(self) -> None:
        """Release the slot of a closed connection. Idempotent."""
        self._places.release_slot(self)
        if self.is_refused:
            self.is_refused = False
            self._places.forget_refusal()

    def mark_busy(self) -> None:
        """Mark the connection as busy with a request."""
        self._places.mark_busy(self)

    def mark_idle(self) -> None:
        """Mark the connection as idle."""
        self._places.mark_idle(self)

    @property
    def is_sent(self) -> bool:
        """Whether all output of the connection has been sent."""
        return self._connection is None or self._connection.is_sent

    def close_now(self) -> None:
        """Close the connection at once."""
        self.is_cut = True
        if self._connection is not None:
            self._connection.close_now()
        else:
            # This makes pending operations on the socket fail at once.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """Accepts the connections of a listening socket. Has the interface that uvicorn expects of a
    server.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[AcceptedConnection], asyncio.BaseProtocol],
        *,
        places: ConnectionSlots,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        silence_s: float,
        is_urgent: Callable[[bytes], bool],
    ) -> None:
        """Start accepting connections; needs a running event loop.

        `connect` returns the protocol that serves a connection. `places` limits the number of
        connections. `handshake_s` is the longest time of a TLS handshake, and `silence_s` the
        longest time until a connection's first byte, both in seconds. `is_urgent` gets at most the
        first 256 bytes of a connection and returns whether it is set up before the waiting ones.
        """
        listener.setblocking(False)
        # uvicorn closes its socket before it is removed from the event loop.
        self._listener = listener.dup()
        self._connect = connect
        self._places = places
        self._tls, self._handshake_s, self._silence_s = tls, handshake_s, silence_s
        self._is_urgent = is_urgent
        self._turns = ArrivalQueue()
        self._beginning: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Stop accepting and cancel handshakes. Open connections stay open. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes that `close` cancelled have ended."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept all waiting connections, so that an urgent one is found even if many came before
        it.
        """
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # No connection is waiting, or the peer has already disconnected.
                return
            except OSError:
                # The process has no file descriptor left.
                self._places.evict_idle()
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_S, self._listen)
                return
            sock.setblocking(False)
            self._enter(sock)

    def _enter(self, sock: socket.socket) -> None:
        accepted = AcceptedConnection(sock, self._places)
        if not accepted.acquire_slot():
            sock.close()
            return
        task = self._loop.create_task(self._begin(sock, accepted))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket, accepted: AcceptedConnection) -> None:
        """Set up one connection: wait for its first bytes, for its turn, and for its TLS
        handshake.
        """
        try:
            limit_s = REFUSAL_TIMEOUT_S if accepted.is_refused else self._silence_s
            with contextlib.ExitStack() as unless_spoken:
                unless_spoken.callback(sock.close)
                first = await _first_bytes(sock, limit_s)
                if first is None or accepted.is_cut:
                    return
                if not self._is_urgent(first):
                    # Busy, so that it keeps its slot while it waits.
                    accepted.mark_busy()
                    await self._turns.wait_turn()
                unless_spoken.pop_all()
            accepted.mark_idle()
            limit_s = min(self._handshake_s, REFUSAL_TIMEOUT_S if accepted.is_refused else math.inf)
            await self._loop.connect_accepted_socket(
                lambda: self._connect(accepted),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else limit_s,
            )
        except (OSError, TimeoutError):
            # The peer disconnected, does not use TLS, or was too slow.
            pass
        finally:
            if not accepted.is_served:
                accepted.release_slot()


async def _first_bytes(sock: socket.socket, limit_s: float) -> bytes | None:
    """Wait for the first bytes of a connection without consuming them. Return b"" if the connection
    was closed, and None if nothing came within `limit_s` seconds.

    Until then the connection costs only a file descriptor, without buffers for TLS.
    """
    with contextlib.suppress(BlockingIOError):
        return sock.recv(_PEEKED_BYTES, socket.MSG_PEEK)
    loop = asyncio.get_running_loop()
    spoken = asyncio.Event()
    loop.add_reader(sock.fileno(), spoken.set)
    try:
        await asyncio.wait_for(spoken.wait(), limit_s)
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(_PEEKED_BYTES, socket.MSG_PEEK)
