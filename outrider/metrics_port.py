"""Prometheus port of a process: plain text on loopback, or TLS with operator certificates.

The server of `prometheus_client` cannot be used with TLS: it performs the handshake where it
accepts connections, so one silent connection would block all others.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from outrider.errors import FailedPreconditionError, OutriderError, UnauthenticatedError
from outrider.transport.tls import CertificateRole, TlsConfig, server_context

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

CONNECTION_TIMEOUT_S: Final = 10.0
"""Maximum duration of a connection in seconds: handshake, request and response."""
MAX_SCRAPES: Final = 16
"""Maximum number of simultaneous connections; further connections are closed."""
CHECK_INTERVAL_S: Final = 0.5
"""Seconds between two checks for connections that have lasted too long."""


class PortMetrics:
    """Counters of a process's gRPC port: refused calls and TLS handshakes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter

        self._refusals = Counter(
            "outrider_access_refusals_total",
            "Calls that were turned away for the caller's certificate, by reason.",
            ["reason"],
            registry=registry,
        )
        self._handshakes = Counter(
            "outrider_tls_handshakes_total",
            "TLS handshakes that began on the gRPC port; one without a good certificate leads to "
            "no call.",
            registry=registry,
        )

    def count_refusal(self, reason: str) -> None:
        """Count a refused call. `reason` is the value of the counter's label."""
        self._refusals.labels(reason).inc()

    def count_handshake(self) -> None:
        """Count the start of a TLS handshake. Thread-safe."""
        self._handshakes.inc()


WsgiApp = Callable[..., Iterable[bytes]]


def serve_metrics(
    registry: CollectorRegistry,
    host: str,
    port: int,
    *,
    tls: TlsConfig | None = None,
    check: Callable[[str | None], object] = lambda header: None,
) -> str:
    """Serve /metrics on a separate thread until the process ends, and return the address as
    HOST:PORT.

    With `tls`, callers need a certificate of the role `operator`. `check` is called with each
    request's `authorization` header, or None, and raises OutriderError to refuse the request.
    Raises FailedPreconditionError if the address or the certificate cannot be used.
    """
    from prometheus_client import make_wsgi_app

    app = _judging(make_wsgi_app(registry), check)
    try:
        server = _MetricsHttpServer((host, port), _Handler)
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot listen on {host}:{port}: {error.strerror}", reason="ADDRESS_IN_USE"
        ) from error
    server.set_app(app)
    if tls is not None and tls.cert is not None:
        server.secure(tls)
    threading.Thread(
        target=server.serve_forever, args=(CHECK_INTERVAL_S,), name="metrics", daemon=True
    ).start()
    return f"{host}:{server.server_port}"


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing: scrapes are not logged."""


class _MetricsHttpServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = threading.BoundedSemaphore(MAX_SCRAPES)
        self._ends: dict[socket.socket, float] = {}
        """Time of the monotonic clock at which each connection is cut."""
        self._lock = threading.Lock()
        """Protects the connections' times."""
        self._tls: TlsConfig | None = None

    def server_bind(self) -> None:
        """Bind without resolving this host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def secure(self, tls: TlsConfig) -> None:
        """Use TLS for all later connections. Raises FailedPreconditionError if the files cannot be
        used."""
        server_context(tls, require_client=True)
        self._tls = tls

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close the connection if there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Perform the handshake, then serve the request, on the connection's thread."""
        end, tls = time.monotonic() + CONNECTION_TIMEOUT_S, self._tls
        try:
            if tls is not None:
                # Made for each connection: files that were replaced count from now on.
                context = server_context(tls, require_client=True)
                request = context.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
            # Not a timeout of the socket: that begins anew with every byte.
            with self._cut_at(end, request):
                if tls is not None:
                    _shake_hands(request, tls)
                super().process_request_thread(request, client_address)
        except (OSError, OutriderError) as error:
            logger.debug("a scrape failed", extra={"reason": str(error)})
            self.shutdown_request(request)
        finally:
            self._room.release()

    def service_actions(self) -> None:
        """Cut the connections that have lasted too long, so that their threads end."""
        now = time.monotonic()
        with self._lock:
            for request, end in self._ends.items():
                if now >= end:
                    with contextlib.suppress(OSError):
                        # Not the end of TLS, which would wait for the other side.
                        socket.socket.shutdown(request, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _cut_at(self, end: float, request: socket.socket) -> Generator[None]:
        with self._lock:
            self._ends[request] = end
        try:
            yield
        finally:
            with self._lock:
                del self._ends[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, because a scraper may disconnect at any time."""
        logger.debug("a scrape failed", exc_info=True)


def _shake_hands(request: ssl.SSLSocket, tls: TlsConfig) -> None:
    """Perform the TLS handshake and check the caller's certificate.

    Raises PermissionDeniedError for a certificate of another role.
    """
    request.do_handshake()
    shown: Any = request.getpeercert() or {}
    names = [str(value) for _kind, value in shown.get("subjectAltName", ())]
    tls.check_caller(names, (CertificateRole.OPERATOR,))


def _judging(app: WsgiApp, check: Callable[[str | None], object]) -> WsgiApp:
    def judge(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        try:
            check(environ.get("HTTP_AUTHORIZATION"))
        except OutriderError as error:
            missing = isinstance(error, UnauthenticatedError)
            status = "401 Unauthorized" if missing else "403 Forbidden"
            start(status, [("content-type", "text/plain"), ("www-authenticate", "Bearer")])
            return [error.message.encode()]
        return app(environ, start)

    return judge
