"""Processes whose models load: Prometheus reaches them, routers and probes see none that serves."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.stack import Process
from tests.waiting import wait_until


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def states(port: int) -> set[str] | None:
    """States that a process is in; None while its port is shut."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            page = answer.read().decode()
    except OSError:
        return None
    return set(re.findall(r'^outrider_process_state\{state="(\w+)"\} 1', page, re.M))


def probe(port: int) -> str | None:
    """Answer of the health port that Kubernetes asks; None while it is shut."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError:
            return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_the_metrics_port_says_loading_long_before_the_process_serves(
    role: str, tiny_target: Path, tmp_path: Path
) -> None:
    go, metrics, health = tmp_path / "go", free_port(), free_port()
    flags = ["--model", str(tiny_target), "--metrics-port", str(metrics)]
    flags += ["--health-listen", f"127.0.0.1:{health}"]
    flags += ["--hook", f"tests.fakes.held_start:until={go}"]
    flags += ["--methods", "ngram"] if role == "drafter" else []
    process = Process(role, f"outrider_{role}", flags, tmp_path / "log").start()
    try:
        wait_until(lambda: states(metrics) == {"loading"}, timeout_s=60)
        assert process.alive and probe(health) is None
        go.touch()
        process.wait_ready()
        assert states(metrics) == {"serving"} and probe(health) == "SERVING"
        assert process.ready["metrics"] == f"127.0.0.1:{metrics}"
    finally:
        go.touch()
        process.stop()
