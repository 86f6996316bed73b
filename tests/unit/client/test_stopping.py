"""`outrider serve` and its signals: before all is up, and after."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from outrider.client.commands import main, serve
from outrider.client.local import child_process, cluster, supervisor
from outrider.client.local.child_process import ChildProcess
from outrider.client.local.model_files import ModelFiles
from outrider.client.local.supervisor import Supervisor
from tests.waiting import wait_until

STARTED_S = 30.0
SERVE = ["serve", "--port", "0"]
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class FakeChildren:
    """Children that say what the flags tell them to, in place of the three processes."""

    def __init__(
        self, *flags: str, drain_timeout_s: float | None = None, at: Path = Path()
    ) -> None:
        """`drain_timeout_s`: they end so long after SIGTERM and leave a file with their name in
        `at`."""
        self.started: list[ChildProcess] = []
        self.flags = list(flags)
        self._drain_timeout_s, self._at = drain_timeout_s, at

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are what `outrider serve` starts, and SIGTERM comes as soon as it serves."""
        monkeypatch.setattr(cluster, "ChildProcess", self.make)
        monkeypatch.setattr(cluster, "wait_healthy", lambda *_, **__: None)
        monkeypatch.setattr(Supervisor, "__enter__", _enter_and_signal)

    def make(self, name: str, *_: object, **__: object) -> ChildProcess:
        flags = list(self.flags)
        if self._drain_timeout_s is not None:
            flags += [
                "--drain-timeout-s",
                str(self._drain_timeout_s),
                "--drained",
                str(self._at / name),
            ]
        child = ChildProcess(name, "tests.fakes.child", flags)
        self.started.append(child)
        return child


@pytest.fixture(autouse=True)
def handlers() -> Generator[None]:
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(path=Path("/models/tiny"), name="tiny", head=None)
    monkeypatch.setattr(serve, "find_model", lambda *_, **__: files)
    monkeypatch.setattr(cluster, "check_files", lambda _: ())
    # A start that no signal ends must end all the same.
    monkeypatch.setattr(cluster, "START_TIMEOUT_S", STARTED_S)


def send_when(number: int, children: FakeChildren, count: int) -> threading.Thread:
    """Send ourselves a signal once so many children run."""

    def wait_and_send() -> None:
        wait_until(lambda: sum(child.pid is not None for child in children.started) >= count)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_during_the_start_stops_what_was_started(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    children = FakeChildren("--silent")
    monkeypatch.setattr(cluster, "ChildProcess", children.make)
    sender = send_when(number, children, 2)
    with pytest.raises(SystemExit) as ended:
        main.main(SERVE)
    sender.join()
    assert ended.value.code == status
    # Closed: there is no process any more that it could know of.
    assert [child.name for child in children.started] == ["verifier-0", "drafter-0"]
    assert all(child.pid is None for child in children.started)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_once_a_router_runs_drains_it_and_is_a_clean_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    # Nobody answers at its address, so that all is never ready.
    children = FakeChildren(drain_timeout_s=1.0, at=tmp_path)
    monkeypatch.setattr(cluster, "ChildProcess", children.make)
    # What is merely closed is killed before it has drained.
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)

    def is_ready() -> bool:
        return any(child.name == "router" and child.ready for child in children.started)

    def send_when_ready() -> None:
        wait_until(is_ready)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send_when_ready)
    sender.start()
    assert main.main([*SERVE, "--drain-timeout-s", "20"]) == 0
    sender.join()
    assert drained(tmp_path) == {"router"}
    assert all(child.pid is None for child in children.started)


def test_a_signal_before_a_router_is_ready_is_a_clean_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = FakeChildren()
    make = children.make

    def make_silent_router(name: str, *rest: object, **where: object) -> ChildProcess:
        if name == "router":
            children.flags.append("--silent")
        return make(name, *rest, **where)

    monkeypatch.setattr(cluster, "ChildProcess", make_silent_router)
    sender = send_when(signal.SIGTERM, children, 3)
    assert main.main(SERVE) == 0
    sender.join()
    assert all(child.pid is None for child in children.started)


def test_a_signal_while_all_serve_is_a_clean_end(monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren()
    children.serve(monkeypatch)
    assert main.main(SERVE) == 0
    assert all(child.pid is None for child in children.started)


def test_running_requests_get_their_time_while_those_they_need_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Longer than the time in which what is merely closed must end.
    children = FakeChildren(drain_timeout_s=1.0, at=tmp_path)
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)
    children.serve(monkeypatch)
    assert main.main(["serve", "--routers", "2", "--drain-timeout-s", "20", "--port", "50999"]) == 0
    assert drained(tmp_path) == {"router-0", "router-1"}
    assert all(child.pid is None for child in children.started)


@pytest.mark.parametrize("number", STOPS)
def test_a_second_signal_ends_what_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    children = FakeChildren(drain_timeout_s=2.0 * STARTED_S, at=tmp_path)
    children.serve(monkeypatch)
    closed: list[int | None] = []
    close = ChildProcess.close

    def close_and_note(child: ChildProcess) -> None:
        if child.name == "router" and child.pid is not None:
            closed.append(child.exit_status)
        close(child)

    def send_when_told() -> None:
        wait_until((tmp_path / "router.told").exists)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ChildProcess, "close", close_and_note)
    # A verifier is closed, and so killed after a moment: it is a router that hears the signal.
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)
    sender = threading.Thread(target=send_when_told)
    sender.start()
    assert main.main(SERVE) == 0
    sender.join()
    # It ended by itself: it was told a second time, and not killed.
    assert closed == [0]
    assert not drained(tmp_path)


def test_a_verifier_that_dies_while_requests_end_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    children = FakeChildren(drain_timeout_s=3.0, at=tmp_path)
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervisor, "MIN_BACKOFF_S", 0.05)
    children.serve(monkeypatch)
    pids: list[int] = []

    def kill_when_told() -> None:
        wait_until((tmp_path / "router.told").exists)
        (verifier,) = (child for child in children.started if child.name == "verifier-0")
        assert verifier.pid is not None
        pids.append(verifier.pid)
        os.kill(verifier.pid, signal.SIGKILL)
        wait_until(lambda: verifier.pid not in (pids[0], None))
        pids.append(verifier.pid)

    killer = threading.Thread(target=kill_when_told)
    killer.start()
    assert main.main([*SERVE, "--drain-timeout-s", "20"]) == 0
    killer.join()
    assert len(pids) == 2 and drained(tmp_path) == {"router"}


def test_a_router_that_never_ends_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = FakeChildren("--deaf")
    children.serve(monkeypatch)
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.2)
    began = time.monotonic()
    assert main.main([*SERVE, "--drain-timeout-s", "0.5"]) == 0
    assert time.monotonic() - began < STARTED_S
    assert all(child.pid is None for child in children.started)


def drained(directory: Path) -> set[str]:
    """Who ended when it had drained."""
    return {file.name for file in directory.iterdir() if file.suffix != ".told"}


def _enter_and_signal(entered: Supervisor) -> Supervisor:
    """SIGTERM comes when all is supervised."""
    os.kill(os.getpid(), signal.SIGTERM)
    return entered
