"""Starts the real processes by their command lines and hands out what a fault test needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypedDict

from outrider.client import Client, RetryPolicy
from outrider.client.local.certificates import tls_from
from outrider.transport.tls import CertificateRole, TlsConfig
from tests.waiting import wait_until

START_TIMEOUT_S = 100.0


class Process:
    """One child process that prints a JSON line with its address once it serves."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, name: str, module: str, arguments: list[str], log: Path) -> None:
        self.name, self._module, self._arguments, self._log_path = name, module, arguments, log
        self.address = ""
        self.ready: dict[str, Any] = {}
        self._popen: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None

    @property
    def log_path(self) -> Path:
        """What it has written to stderr, over all its lives."""
        return self._log_path

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self, *, listen: str = "127.0.0.1:0") -> Process:
        """Start the process; `wait_ready` collects its address."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        self._log = self._log_path.open("a", encoding="utf-8")
        self._popen = subprocess.Popen(
            [sys.executable, "-m", self._module, "--listen", listen, *self._arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        return self

    def wait_ready(self) -> Process:
        """Block until the ready line came; fails with the log's tail if the process died."""
        assert self._popen is not None and self._popen.stdout is not None
        timer = threading.Timer(self.start_timeout_s, self._popen.kill)
        timer.start()
        line = self._popen.stdout.readline()
        timer.cancel()
        if not line:
            tail = self._log_path.read_text(encoding="utf-8")[-3000:]
            raise RuntimeError(f"{self.name} did not start:\n{tail}")
        self.ready = json.loads(line)
        self.address = self.ready["address"]
        return self

    def restart(self) -> Process:
        """Start again on the same address."""
        self.stop()
        return self.start(listen=self.address).wait_ready()

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._popen is not None
        self._popen.wait(timeout=10)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, without waiting for what it does."""
        os.kill(self.pid, signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that a fake process understands."""
        os.kill(self.pid, number)

    def wait_ended(self, timeout_s: float = 30.0) -> int:
        """Wait for the process to end by itself; its exit status."""
        assert self._popen is not None
        return self._popen.wait(timeout=timeout_s)

    def end(self, timeout_s: float = 20.0) -> int:
        """SIGTERM; the exit status."""
        assert self._popen is not None
        self._popen.terminate()
        return self._popen.wait(timeout=timeout_s)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL; idempotent."""
        if self._popen is None:
            return
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGCONT)
            self._popen.terminate()
            try:
                self._popen.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait(timeout=5)
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        if self._log is not None:
            self._log.close()
        self._popen = None


def slow_rounds(milliseconds: float) -> list[str]:
    """Flags of a verifier whose rounds last so long, as with a larger model."""
    return ["--hook", f"outrider_bench.hooks.round_delay:round_ms={milliseconds:g}"]


class StackOptions(TypedDict, total=False):
    """What a module's stack is, beside the usual."""

    router: list[str]
    verifier: list[str]
    drafter: list[str]
    """Flags of the processes."""
    with_drafter: bool
    spare: int
    verifier_module: str
    drafter_module: str
    """What is run in place of the process."""


class Stack:
    """A router, a verifier and a drafter on loopback, with a tiny model unless told otherwise;
    `spare` (0, 1 or 2) are further verifiers."""

    def __init__(
        self,
        directory: Path,
        *,
        model: str,
        head: str,
        router: list[str] | None = None,
        verifier: list[str] | None = None,
        drafter: list[str] | None = None,
        with_drafter: bool = True,
        spare: int = 0,
        verifier_module: str = "outrider_verifier",
        drafter_module: str = "outrider_drafter",
        tls: Path | None = None,
        api_key: str | None = None,
        router_module: str = "outrider_router",
    ) -> None:
        """`tls`: a folder of `outrider certs`, whose certificates all ports have; `api_key`: what
        the stack's own clients show; `router_module`: what runs the router's command line."""
        self._tls, self.api_key = tls, api_key
        methods = ["--head", head, "--methods", "eagle3,ngram"] if head else ["--methods", "ngram"]
        own = [*(verifier or []), *self._certificate(CertificateRole.VERIFIER)]
        taps = ["--feature-head", head] if head else []
        self.verifiers = [
            Process(
                name,
                verifier_module,
                ["--model", model, *taps, "--planner", "fixed", *own, *named],
                directory / f"{name}.log",
            )
            for name, named in (
                ("verifier", []),
                ("spare", ["--verifier-id", "spare"]),
                ("third", ["--verifier-id", "third"]),
            )[: 1 + spare]
        ]
        self.verifier = self.verifiers[0]
        self.drafter = Process(
            "drafter",
            drafter_module,
            [
                "--model",
                model,
                *methods,
                *(drafter or []),
                *self._certificate(CertificateRole.DRAFTER),
            ],
            directory / "drafter.log",
        )
        self._directory, self._model = directory, model
        self._router_arguments = [*(router or []), *self._certificate(CertificateRole.ROUTER)]
        self._with_drafter, self._router_module = with_drafter, router_module
        self.router = Process("router", router_module, [], directory / "router.log")

    def __enter__(self) -> Stack:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        for verifier in self.verifiers:
            verifier.start()
        if self._with_drafter:
            self.drafter.start()
        for verifier in self.verifiers:
            verifier.wait_ready()
        drafters: list[str] = []
        if self._with_drafter:
            self.drafter.wait_ready()
            drafters = ["--drafter", self.drafter.address]
        verifiers = [part for each in self.verifiers for part in ("--verifier", each.address)]
        arguments = ["--model", self._model, *verifiers, *drafters]
        self.router = Process(
            "router",
            self._router_module,
            [*arguments, *self._router_arguments],
            self._directory / "router.log",
        )
        self.router.start().wait_ready()
        wait_until(self.healthy, timeout_s=20.0, what="a healthy fleet")

    def repair(self) -> None:
        """Start the processes that have ended again, at their addresses, and let stopped ones
        continue."""
        for process in (*self.verifiers, self.drafter, self.router):
            if process.alive:
                process.thaw()
            elif process.address:
                process.restart()
        wait_until(self.healthy, timeout_s=20.0, what="a healthy fleet")

    def client(self, *, timeout_s: float = 60.0) -> Client:
        """A client that tries again, with the stack's own key."""
        tls = None if self._tls is None else TlsConfig(ca=self._tls / "ca.pem")
        return Client(self.router.address, timeout_s=timeout_s, tls=tls, api_key=self.api_key)

    def _certificate(self, role: CertificateRole) -> list[str]:
        if self._tls is None:
            return []
        tls = tls_from(self._tls, role)
        return ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca)]

    def healthy(self) -> bool:
        """Whether the router sees every verifier and drafter healthy."""
        with self.client(timeout_s=5.0) as client:
            info = client.server_info()
        return all(peer.healthy for peer in (*info.verifiers, *info.drafters))

    def _stop(self) -> None:
        for process in (self.router, self.drafter, *self.verifiers):
            process.stop()


def connect(stack: Stack) -> Client:
    """A client that tries once: what a stream survives, it survives by the fleet."""
    return Client(stack.router.address, timeout_s=60.0, retry=RetryPolicy(max_attempts=1))


def metric(router: Process, name: str) -> float:
    """Sum of a counter's samples over its labels."""
    address = router.ready["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
