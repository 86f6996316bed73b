"""Child processes: ready lines, last words, and dying with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from unittest.mock import Mock

import pytest

from outrider.client.local import child_process
from outrider.client.local.child_process import ChildProcess, check_running
from outrider.client.local.supervisor import MAX_START_S, ChildSupervisor
from outrider.errors import UnavailableError
from tests.waiting import wait_until

CHILD = "tests.fakes.child"


@pytest.fixture
def start(tmp_path: Path) -> Generator[Callable[..., ChildProcess]]:
    started: list[ChildProcess] = []

    def make(*flags: str) -> ChildProcess:
        child = ChildProcess("child", CHILD, flags, log_dir=tmp_path)
        child.start()
        started.append(child)
        return child

    yield make
    for child in started:
        child.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_gone(pid: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not gone(pid):
        assert time.monotonic() < end, "the child is still there"
        time.sleep(0.02)


def test_a_child_is_ready_when_it_says_so_and_stops_when_closed(
    start: Callable[..., ChildProcess],
) -> None:
    child = start()
    assert child.wait_ready(30).startswith("127.0.0.1:")
    pid = child.pid
    assert pid is not None and child.exit_status is None
    child.close()
    child.close()
    wait_gone(pid, 5)


def test_a_child_that_dies_is_reported_with_its_last_words(
    start: Callable[..., ChildProcess],
) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)ended with status 1.*no such model"):
        start("--fail").wait_ready(30)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--fail", "child ended with status 1: no such model"),
        ("--refuse", "child ended with status 2: the head is for another target"),
        ("--broken", "child ended with status 1: RuntimeError: no memory is left"),
        ("--killed", "child ended by SIGKILL"),
    ],
)
def test_the_last_line_of_a_start_that_fails_is_the_childs_own_reason(
    flag: str, message: str
) -> None:
    child = ChildProcess("child", CHILD, [flag])
    child.start()
    with pytest.raises(UnavailableError) as caught:
        child.wait_ready(30)
    child.close()
    assert caught.value.message == message


def test_a_child_that_fails_while_another_is_waited_for_is_reported_at_once(
    start: Callable[..., ChildProcess],
) -> None:
    waiting, failing = start("--silent"), start("--refuse")
    while failing.exit_status is None:
        time.sleep(0.01)
    with pytest.raises(UnavailableError, match="the head is for another target"):
        check_running((waiting, failing))


def test_a_child_that_says_nothing_is_given_up(start: Callable[..., ChildProcess]) -> None:
    with pytest.raises(UnavailableError, match="not ready after"):
        start("--silent").wait_ready(0.2)


def test_a_child_that_ignores_being_asked_is_killed(
    start: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "STOP_TIMEOUT_S", 0.2)
    child = start("--deaf")
    child.wait_ready(30)
    pid = child.pid
    assert pid is not None
    child.close()
    wait_gone(pid, 5)


def test_a_restarted_child_keeps_its_address(start: Callable[..., ChildProcess]) -> None:
    child = start()
    first = child.wait_ready(30)
    child.start()
    assert child.wait_ready(30) == first


def test_a_keeper_restarts_what_died_after_its_pause(start: Callable[..., ChildProcess]) -> None:
    child = start()
    child.wait_ready(30)
    keeper, now = ChildSupervisor(child, print), time.monotonic()
    keeper.check_child(now)
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while child.exit_status is None:
        time.sleep(0.01)
    keeper.check_child(now)
    keeper.check_child(now + 0.1)
    assert child.pid == pid
    keeper.check_child(now + 1.0)
    assert child.pid != pid
    child.wait_ready(30)


PARENT = """
import sys, time
from outrider.client.local.child_process import ChildProcess
child = ChildProcess("child", "tests.fakes.child", {flags})
child.start()
child.wait_ready(30)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("flags", [(), ("--deaf",)])
def test_a_child_dies_with_a_parent_that_was_killed(flags: tuple[str, ...]) -> None:
    script = PARENT.format(flags=flags)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not gone(pid)
        parent.kill()
    wait_gone(pid, 10)


def test_a_stopped_child_dies_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(flags=())], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_gone(pid, 10)


def test_a_child_lives_on_after_the_thread_that_asked_for_it(
    start: Callable[..., ChildProcess],
) -> None:
    started: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    (child,) = started
    child.wait_ready(30)
    time.sleep(0.1)
    assert child.exit_status is None


@pytest.mark.parametrize("error", [OSError("no memory"), RuntimeError("no thread")])
def test_a_restart_that_fails_is_tried_again(
    start: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    child = start()
    child.wait_ready(30)
    said: list[str] = []
    keeper, now = ChildSupervisor(child, said.append), time.monotonic()
    child.kill()
    wait_until(lambda: child.exit_status is not None)
    keeper.check_child(now)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Mock(side_effect=error))
        keeper.check_child(now + 1.0)
    assert child.pid is None
    assert said[-1] == f"child could not be started: {error}; starting it again"
    # The pause has doubled, and nothing happens before it is over.
    keeper.check_child(now + 1.5)
    assert child.pid is None
    keeper.check_child(now + 2.1)
    child.wait_ready(30)
    keeper.check_child(now + 2.2)
    assert len(said) == 2


def test_a_restart_that_never_comes_up_is_tried_again(
    start: Callable[..., ChildProcess],
) -> None:
    child = start("--silent")
    said: list[str] = []
    keeper, now = ChildSupervisor(child, said.append), time.monotonic()
    keeper.check_child(now + MAX_START_S - 1.0)
    assert not said
    keeper.check_child(now + MAX_START_S + 1.0)
    assert said == ["child was not ready after 600 s and was killed; starting it again"]
    wait_until(lambda: child.exit_status is not None)


def test_a_child_that_says_nothing_of_its_health_is_not_asked(
    start: Callable[..., ChildProcess],
) -> None:
    child = start()
    child.wait_ready(30)
    said: list[str] = []
    keeper, now = ChildSupervisor(child, said.append), time.monotonic()
    for seconds in range(100):
        keeper.check_child(now + seconds)
    assert not said and child.exit_status is None
