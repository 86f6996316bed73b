"""HTTP server of the router: uvicorn in the router's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator
from functools import partial

import uvicorn

from outrider.errors import FailedPreconditionError
from outrider.transport.tls import TlsConfig, TlsFiles, uvicorn_tls
from outrider_router.api.http.acceptor import AcceptedConnection, Acceptor
from outrider_router.api.http.app import make_app
from outrider_router.api.http.connection_slots import (
    CONNECTIONS_EXHAUSTED,
    ConnectionSlots,
    max_connections,
)
from outrider_router.api.http.connections import HttpConnection
from outrider_router.api.http.middleware import asks_for_open_path
from outrider_router.config import HttpConfig
from outrider_router.requests.service import RouterService

BACKLOG = 2048
STOP_GRACE_S = 2
"""Time in seconds that connections get to close when the server stops. All requests have already
ended by then."""
CERTIFICATE_CHECK_S = 10.0
"""Time in seconds between two checks of whether the certificate has changed."""
_LOOK_S = 0.005
_MAX_PORT = 65535


class _HttpUvicornServer(uvicorn.Server):
    """uvicorn server that does not handle signals, and whose connections need a slot first."""

    def __init__(
        self, config: uvicorn.Config, *, options: HttpConfig, places: ConnectionSlots
    ) -> None:
        super().__init__(config)
        self._options, self._places = options, places

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections of one listening socket."""
        await self.lifespan.startup()
        assert sockets is not None
        (listener,) = sockets
        acceptor = Acceptor(
            listener,
            self._serve_connection,
            places=self._places,
            tls=self.config.ssl,
            handshake_s=self._options.handshake_s,
            silence_s=self._options.head_s,
            is_urgent=partial(asks_for_open_path, root_path=self._options.root_path),
        )
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True

    def _serve_connection(self, accepted: AcceptedConnection) -> HttpConnection:
        return HttpConnection(
            accepted,
            self._options,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """Serves a router over HTTP until it is stopped."""

    def __init__(self, address: str, service: RouterService) -> None:
        """Create a server for the address HOST:PORT; port 0 picks a free one."""
        self._address = address
        self._service = service
        self._server: _HttpUvicornServer | None = None
        self._task: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind the address, start serving and return the address. Raises FailedPreconditionError if
        the address cannot be bound or the certificate is invalid.
        """
        config = self._service.config
        listener = bind_socket(
            self._address,
            slow_reader_timeout_s=config.overload.slow_reader_timeout_s,
            shared=config.reuse_ports,
        )
        host, port = listener.getsockname()[:2]
        tls = config.client_tls
        options = config.http_options
        server = _HttpUvicornServer(
            uvicorn.Config(
                make_app(self._service),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_graceful_shutdown=STOP_GRACE_S,
                http=HttpConnection,
                # A connection that changes to WebSocket would never release its slot.
                ws="none",
                timeout_keep_alive=options.keep_alive_s,
                **uvicorn_tls(tls),
            ),
            options=options,
            places=self._make_slots(),
        )
        self._server = server
        self._task = asyncio.create_task(server.serve([listener]), name="http")
        while not server.started and not self._task.done():
            await asyncio.sleep(_LOOK_S)
        if self._task.done():
            await self._task
        if server.config.ssl is not None:
            self._renewing = asyncio.create_task(_renew(server.config.ssl, tls), name="renew")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _make_slots(self) -> ConnectionSlots:
        refusals = self._service.metrics.refusals
        most = max_connections(self._service.config.http_options.max_connections)
        return ConnectionSlots(most, refusals.labels(CONNECTIONS_EXHAUSTED).inc)

    async def stop(self) -> None:
        """Close every connection. Idempotent. The router's requests must have ended before."""
        server, task = self._server, self._task
        self._server = self._task = None
        if self._renewing is not None:
            self._renewing.cancel()
        if server is not None and task is not None:
            server.should_exit = True
            await task


async def _renew(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Load a replaced certificate into the TLS context, for new connections."""
    files = TlsFiles(tls)
    told = files.current_material()
    while True:
        await asyncio.sleep(CERTIFICATE_CHECK_S)
        found = files.current_material()
        if found is not told and tls.cert is not None:
            # The files were valid when read; if they changed since, the next check reads them.
            with contextlib.suppress(OSError):
                context.load_cert_chain(tls.cert, tls.key)
                told = found


def bind_socket(
    address: str, *, slow_reader_timeout_s: float, shared: bool = False
) -> socket.socket:
    """Return a listening socket for HOST:PORT. With `shared`, other processes may listen there too.

    If the system supports it, the kernel closes a connection whose client reads nothing for
    `slow_reader_timeout_s`, so that its buffers are freed. Raises FailedPreconditionError.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        if not 0 <= int(port) <= _MAX_PORT:
            raise ValueError(f"the port must be in [0, {_MAX_PORT}]")
        family, kind, protocol, _, where = socket.getaddrinfo(
            host or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        raise FailedPreconditionError(
            f"cannot listen on {address!r}: {error}", reason="BAD_ADDRESS"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = max(1, round(slow_reader_timeout_s * 1000))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise FailedPreconditionError(
            f"cannot listen on {address}: {error.strerror}", reason="ADDRESS_IN_USE"
        ) from error
    return listener
