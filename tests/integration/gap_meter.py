"""Measures how long running streams and `/health` pause while a test attacks a fleet."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from outrider.client import Client, user
from outrider.transport.tls import TlsConfig

MAX_EXTRA_GAP_S = 1.0
"""Seconds that an attack may add to the longest calm gap."""
HEALTH_INTERVAL_S = 0.05


@dataclass
class Gaps:
    """Longest pauses of one measurement, in seconds; a pause that still lasts at its end counts."""

    stream_s: float = 0.0
    """Between two texts of one stream, over all streams."""
    health_s: float = 0.0
    """Between two answers with status 200 of `/health`."""
    tokens: int = 0
    """Texts that all streams received."""
    errors: list[str] = field(default_factory=list)
    """Errors that streams ended with, and answers of `/health` other than 200."""

    def assert_close_to(self, calm: Gaps, extra_s: float = MAX_EXTRA_GAP_S) -> None:
        """Fails if streams or `/health` paused longer than in a calm measurement, by `extra_s`."""
        assert not self.errors, self.errors
        assert self.stream_s <= calm.stream_s + extra_s, (self, calm)
        assert self.health_s <= calm.health_s + extra_s, (self, calm)


class GapMeter:
    """A context in which streams run and `/health` is asked; `gaps` holds the result after it.

    `router`: HOST:PORT of the gRPC API. `http`: HOST:PORT of the HTTP API, or "" to leave
    `/health` out. `ca`: the authority of both ports' certificates; without it they have none. Each
    stream is started again when it ends, without a pause being counted
    between the two; the first text of a stream starts its clock.
    """

    def __init__(
        self, router: str, http: str = "", *, streams: int = 2, ca: Path | None = None
    ) -> None:
        self.gaps = Gaps()
        self._router, self._http = router, http
        self._tls = None if ca is None else TlsConfig(ca=ca)
        self._context = None if ca is None else ssl.create_default_context(cafile=ca)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run_streams, args=(number,), daemon=True)
            for number in range(streams)
        ]
        if http:
            self._threads.append(threading.Thread(target=self._poll_health, daemon=True))

    def __enter__(self) -> GapMeter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60.0)
            assert not thread.is_alive(), "a stream or /health gave no answer for 60 s"

    def _run_streams(self, number: int) -> None:
        with Client(self._router, timeout_s=60.0, tls=self._tls) as client:
            while not self._stop.is_set():
                try:
                    self._run_stream(client, number)
                except Exception as error:
                    self._record_error(f"stream: {error!r}")
                    time.sleep(0.1)

    def _run_stream(self, client: Client, number: int) -> None:
        request = [user(f"Count from {number}.")]
        with client.stream(request, max_tokens=400, ignore_eos=True) as stream:
            newest = None
            for _ in stream:
                now = time.monotonic()
                with self._lock:
                    self.gaps.tokens += 1
                    if newest is not None:
                        self.gaps.stream_s = max(self.gaps.stream_s, now - newest)
                newest = now
                if self._stop.is_set():
                    return

    def _poll_health(self) -> None:
        newest = time.monotonic()
        while not self._stop.is_set():
            status = self._health_status()
            now = time.monotonic()
            with self._lock:
                self.gaps.health_s = max(self.gaps.health_s, now - newest)
            if status == "200":
                newest = now
            else:
                self._record_error(f"/health: {status}")
            self._stop.wait(HEALTH_INTERVAL_S)

    def _health_status(self) -> str:
        """Status of one request to `/health`, or the error that it ended with."""
        if self._context is None:
            connection = http.client.HTTPConnection(self._http, timeout=60.0)
        else:
            connection = http.client.HTTPSConnection(
                self._http, timeout=60.0, context=self._context
            )
        try:
            connection.request("GET", "/health")
            return str(connection.getresponse().status)
        except OSError as error:
            return repr(error)
        finally:
            connection.close()

    def _record_error(self, what: str) -> None:
        with self._lock:
            self.gaps.errors.append(what)


def measure_calm(
    router: str,
    http: str = "",
    *,
    streams: int = 2,
    seconds: float = 3.0,
    ca: Path | None = None,
) -> Gaps:
    """Gaps of a fleet that nothing attacks, measured for `seconds`."""
    with GapMeter(router, http, streams=streams, ca=ca) as meter:
        time.sleep(seconds)
    return meter.gaps
