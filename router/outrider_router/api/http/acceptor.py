"""Acceptor of an HTTP port: counts connections before TLS and sets them up one at a time.

The TLS handshake has a time limit. One connection is set up per turn of the event loop, so that a
burst of them does not block it.
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
"""Time in seconds that a connection without a slot gets for its handshake and its request."""
_RETRY_S: Final = 0.05
"""Time until the next try where the system had no descriptor for a connection."""
_MAX_ACCEPTS: Final = 256
"""Connections that are accepted in one turn of the event loop: about 20 ms."""
_PEEKED_BYTES: Final = 256


class AcceptedConnection:
    """One connection from the moment it is accepted until it is closed."""

    def __init__(self, sock: socket.socket, places: ConnectionSlots) -> None:
        self._sock = sock
        self._places = places
        self._connection: SlotHolder | None = None
        """What serves it; None before and during the handshake."""
        self.is_cut = False
        self.is_refused = False
        """Whether it has no place, and is only told so."""

    def acquire_slot(self) -> bool:
        """Acquire a slot or the right to receive a refusal; return whether either was possible."""
        if self._places.acquire_slot(self):
            return True
        self.is_refused = self._places.record_refusal()
        return self.is_refused

    @property
    def is_served(self) -> bool:
        """Whether the handshake is done and a protocol serves the connection."""
        return self._connection is not None

    def begin_serving(self, connection: SlotHolder) -> None:
        """Forward the calls of a slot holder to the protocol that serves the connection from now
        on."""
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
        """Whether everything that was answered has been sent."""
        return self._connection is None or self._connection.is_sent

    def close_now(self) -> None:
        """Close the connection at once."""
        self.is_cut = True
        if self._connection is not None:
            self._connection.close_now()
        else:
            # Whatever waits for the peer goes on at once, and fails.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """Accepts the connections of a listening socket, with the interface that uvicorn expects of a
    server."""

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
        """`connect` makes what serves a connection; `silence_s` is the longest time until its
        first byte; `is_urgent` says by the first bytes of a connection, up to 256, whether it is
        set up before those that wait. Begins to accept; needs a running loop."""
        listener.setblocking(False)
        # uvicorn closes its own before the loop has forgotten it.
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
        """Stop accepting and end handshakes; open connections stay. Idempotent."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until `close` has completed."""
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept all that wait, so that an urgent one behind many others is found at once."""
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # None is left, or the peer is gone already.
                return
            except OSError:
                # No descriptor is left for it.
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
        """Have a connection served once it has spoken and its handshake is done."""
        try:
            limit_s = REFUSAL_TIMEOUT_S if accepted.is_refused else self._silence_s
            with contextlib.ExitStack() as unless_spoken:
                unless_spoken.callback(sock.close)
                first = await _first_bytes(sock, limit_s)
                if first is None or accepted.is_cut:
                    return
                if not self._is_urgent(first):
                    # It waits for an answer, so it keeps its place meanwhile.
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
            # The peer left, speaks no TLS, or was too slow.
            pass
        finally:
            if not accepted.is_served:
                accepted.release_slot()


async def _first_bytes(sock: socket.socket, limit_s: float) -> bytes | None:
    """Wait for the first bytes of a connection, which stay to be read; none at its end, None if
    neither came in time.

    Until then the connection is a descriptor and nothing else, without buffers for TLS.
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
