"""`outrider serve` and its signals: before all is up, and after."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from outrider.client import cli, local_cluster, serve
from outrider.client.modelfiles import ModelFiles
from outrider.client.processes import ChildProcess

STARTED_S = 30.0


class FakeChildren:
    """Children that say what the flags tell them to, in place of the three processes."""

    def __init__(self, *flags: str) -> None:
        self.started: list[ChildProcess] = []
        self._flags = flags

    def make(self, name: str, _module: str, _args: object, **where: object) -> ChildProcess:
        child = ChildProcess(name, "tests.fakes.child", self._flags)
        self.started.append(child)
        return child


@pytest.fixture(autouse=True)
def handlers() -> Generator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(path=Path("/models/tiny"), name="tiny", head=None)
    monkeypatch.setattr(serve, "find_model", lambda *_, **__: files)
    # A start that no signal ends must end all the same.
    monkeypatch.setattr(local_cluster, "START_S", STARTED_S)


def send_when(number: int, children: FakeChildren, count: int) -> threading.Thread:
    """Send ourselves a signal once so many children run."""

    def wait_and_send() -> None:
        end = time.monotonic() + STARTED_S
        while sum(child.pid is not None for child in children.started) < count:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_the_start_stops_what_was_started(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    children = FakeChildren("--silent")
    monkeypatch.setattr(local_cluster, "ChildProcess", children.make)
    sender = send_when(number, children, 2)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve"])
    sender.join()
    assert ended.value.code == status
    # Closed: there is no process any more that it could know of.
    assert [child.name for child in children.started] == ["verifier-0", "drafter-0"]
    assert all(child.pid is None for child in children.started)


def test_a_signal_while_all_serve_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren()
    monkeypatch.setattr(local_cluster, "ChildProcess", children.make)
    monkeypatch.setattr(local_cluster, "wait_healthy", _signal_later)
    assert cli.main(["serve"]) == 0
    assert all(child.pid is None for child in children.started)


def _signal_later(*_: object, **__: object) -> None:
    """Healthy at once; SIGTERM comes when serving has its own handler."""
    starting = signal.getsignal(signal.SIGTERM)

    def wait_and_send() -> None:
        end = time.monotonic() + STARTED_S
        while signal.getsignal(signal.SIGTERM) is starting:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_and_send, daemon=True).start()
