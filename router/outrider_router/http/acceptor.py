"""Accepts the connections of an HTTP port: counted before the TLS handshake, which has a limit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Callable
from typing import Final

from outrider_router.http.places import Holder, Places

REFUSAL_S: Final = 1.0
"""Time that a connection without a place has for its handshake, and then for its request."""
_RETRY_S: Final = 0.05
"""Time until the next try where the system had no descriptor for a connection."""


class Accepted:
    """One connection from the moment it is accepted until it is closed."""

    def __init__(self, sock: socket.socket, places: Places) -> None:
        self._sock = sock
        self._places = places
        self.connection: Holder | None = None
        """What serves it; None before and during the handshake."""
        self.is_cut = False
        self.is_refused = False
        """Whether it has no place, and is only told so."""

    def enter(self) -> bool:
        """Take a place, or the right to hear of its lack; whether it has either."""
        if self._places.take(self):
            return True
        self.is_refused = self._places.refuse()
        return self.is_refused

    def leave(self) -> None:
        """It is closed. Idempotent."""
        self._places.leave(self)
        if self.is_refused:
            self.is_refused = False
            self._places.refused -= 1

    def busy(self) -> None:
        """It has asked for something."""
        self._places.busy(self)

    def idle(self) -> None:
        """It has its answer, or has begun to speak."""
        self._places.idle(self)

    @property
    def is_sent(self) -> bool:
        """Whether everything that was answered has been sent."""
        return self.connection is None or self.connection.is_sent

    def cut(self) -> None:
        """Close it now."""
        self.is_cut = True
        if self.connection is not None:
            self.connection.cut()
        else:
            # Whatever waits for the peer goes on at once, and fails.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


class Acceptor:
    """A listening socket and the task that accepts its connections; has what uvicorn asks of a
    server."""

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[Accepted], asyncio.BaseProtocol],
        *,
        places: Places,
        tls: ssl.SSLContext | None,
        handshake_s: float,
        silence_s: float,
    ) -> None:
        """`connect` makes what serves a connection; `silence_s` is the longest time until its
        first byte. Begins to accept; needs a running loop."""
        listener.setblocking(False)
        # uvicorn closes its own before the loop has forgotten it.
        self._listener = listener.dup()
        self._connect = connect
        self._places = places
        self._tls, self._handshake_s, self._silence_s = tls, handshake_s, silence_s
        self._beginning: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="accept http")

    def close(self) -> None:
        """Accept nothing more, and end handshakes; connections stay."""
        self._accepting.cancel()
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing of `close` is left to do."""
        await asyncio.gather(self._accepting, *self._beginning, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._listener:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError:
                    # No descriptor is left, or the peer is gone already.
                    self._places.make_room()
                    await asyncio.sleep(_RETRY_S)
                else:
                    self._enter(sock)

    def _enter(self, sock: socket.socket) -> None:
        accepted = Accepted(sock, self._places)
        if not accepted.enter():
            sock.close()
            return
        task = asyncio.create_task(self._begin(sock, accepted))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket, accepted: Accepted) -> None:
        """Have a connection served once it has spoken and its handshake is done."""
        try:
            limit_s = REFUSAL_S if accepted.is_refused else self._silence_s
            with contextlib.ExitStack() as unless_spoken:
                unless_spoken.callback(sock.close)
                if not await _has_spoken(sock, limit_s) or accepted.is_cut:
                    return
                unless_spoken.pop_all()
            accepted.idle()
            limit_s = min(self._handshake_s, REFUSAL_S if accepted.is_refused else math.inf)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._connect(accepted),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else limit_s,
            )
        except (OSError, TimeoutError):
            # The peer left, speaks no TLS, or was too slow.
            pass
        finally:
            if accepted.connection is None:
                accepted.leave()


async def _has_spoken(sock: socket.socket, limit_s: float) -> bool:
    """Wait for the first byte of a connection, or its end; whether either came in time.

    Until then the connection is a descriptor and nothing else, without buffers for TLS.
    """
    with contextlib.suppress(BlockingIOError):
        sock.recv(1, socket.MSG_PEEK)
        return True
    loop = asyncio.get_running_loop()
    spoken = asyncio.Event()
    loop.add_reader(sock.fileno(), spoken.set)
    try:
        await asyncio.wait_for(spoken.wait(), limit_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(sock.fileno())
    return True
