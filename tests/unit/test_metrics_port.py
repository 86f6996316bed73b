"""The metrics port: connections that dawdle are cut, and never more than a few at once."""

from __future__ import annotations

import socket
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from outrider import metrics_port
from outrider.metrics_port import serve_metrics
from outrider.transport.tls import CertificateRole
from tests.fakes.certificates import Authority

ENOUGH_S = 30.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port, "CONNECTION_TIMEOUT_S", 0.5)
    monkeypatch.setattr(metrics_port, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(metrics_port, "MAX_SCRAPES", 2)


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("things", "Things.", registry=found).inc()
    return found


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ENOUGH_S)


def dribble(connection: socket.socket, first: bytes) -> None:
    """Send a byte ten times within the proposal timeout of the port, until it has enough; fails if
    it never has."""
    end = time.monotonic() + ENOUGH_S
    connection.sendall(first)
    while time.monotonic() < end:
        try:
            connection.sendall(b"a")
            connection.settimeout(0.05)
            if not connection.recv(1):
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
    raise AssertionError("the connection was never cut")


def scrape(address: str) -> str:
    """Until there is room; fails if there never is."""
    end = time.monotonic() + ENOUGH_S
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=ENOUGH_S) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < end, "there is no room"


def test_a_request_has_one_deadline_however_steadily_it_dribbles_in(
    registry: CollectorRegistry,
) -> None:
    address = serve_metrics(registry, "127.0.0.1", 0)
    with connect(address) as connection:
        dribble(connection, b"GET /metrics HTTP/1.0\r\nx-long: ")
    assert "things_total 1.0" in scrape(address)


def test_so_has_a_handshake(registry: CollectorRegistry, tmp_path: Path) -> None:
    tls = Authority(tmp_path).role(CertificateRole.ROUTER)
    address = serve_metrics(registry, "127.0.0.1", 0, tls=tls)
    with connect(address) as connection:
        # The head of a long handshake message of TLS.
        dribble(connection, b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb")


def test_one_connection_too_many_is_closed_and_there_is_room_again(
    registry: CollectorRegistry,
) -> None:
    address = serve_metrics(registry, "127.0.0.1", 0)
    silent = [connect(address) for _ in range(3)]
    assert silent[2].recv(1) == b""
    assert [connection.recv(1) for connection in silent] == [b"", b"", b""]
    assert "things_total 1.0" in scrape(address)
    for connection in silent:
        connection.close()
