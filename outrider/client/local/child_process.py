"""Child processes that print {"event": "ready", "address": ...} on stdout when they serve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

from outrider.errors import UnavailableError

STOP_TIMEOUT_S = 5.0
"""Time, in seconds, that an idle process has to stop before it is killed."""
NOT_READY = "CHILD_NOT_READY"
"""Error reason of a process that was not ready in time."""
_TAIL_LINES = 12
_LAST_WORDS_S = 1.0
"""Maximum time, in seconds, for reading the remaining output of a process that has ended."""
_STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-starter")
"""Executor whose only thread starts all child processes. Linux kills a child when the thread that
started it ends, so this thread must live as long as this process."""


class ChildProcess:
    """A child process `python -m MODULE ARGS`, which ends at the latest when this process ends."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        listen: str = "127.0.0.1:0",
        log_dir: Path | None = None,
    ) -> None:
        """Create a process without starting it.

        The process logs to `log_dir`/`name`.log, or to this process's stderr if `log_dir` is None.
        `listen` is the address at which the process serves. If the port is 0, the process chooses a
        free port, and keeps it when it is restarted.
        """
        self.name = name
        self._command = [sys.executable, "-m", "outrider.client.local.parent_watch", module, *args]
        self._listen = listen
        self._log_file = None if log_dir is None else log_dir / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._said = threading.Event()
        self.ready: dict[str, str] = {}
        """Fields of the ready event that the process has printed; empty before the process is
        ready."""
        self.failure = ""
        """Reason in the failure event that the process has printed; "" if there was none."""

    @property
    def address(self) -> str:
        """Address at which the process serves. Raises KeyError before the process is ready."""
        return self.ready["address"]

    @property
    def pid(self) -> int | None:
        """Process id; None before the process is first started."""
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start or restart the process. Raises OSError or RuntimeError if the system has no
        process, file descriptor or thread left; the caller may try again later."""
        self.close()
        self._said = threading.Event()
        self.ready = {}
        self.failure = ""
        with contextlib.ExitStack() as stack:
            log: IO[str] | None = None
            if self._log_file is not None:
                log = stack.enter_context(self._log_file.open("a", encoding="utf-8"))
            starting = _STARTER.submit(self._spawn, log)
            try:
                starting.result()
            except BaseException:
                # A signal may interrupt this wait; `close` must find the started process.
                wait([starting])
                raise

    def _spawn(self, log: IO[str] | None) -> None:
        """Create the process and the thread that reads its stdout. This runs on the thread of
        `_STARTER`, which signals do not interrupt."""
        process = self._process = subprocess.Popen(
            [*self._command, "--listen", self._listen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Only this process handles Ctrl-C in a terminal; it stops the children in order.
            start_new_session=True,
        )
        try:
            threading.Thread(target=self._read, args=(process, self._said), daemon=True).start()
        except RuntimeError:
            self.kill()
            raise

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the process serves and return its address.

        Raises UnavailableError, with the process's failure reason or the end of its log, if the
        process ends or is not ready within `timeout_s`.
        """
        if not self._said.wait(timeout_s):
            raise UnavailableError(
                f"{self.name} was not ready after {timeout_s:g} s{self.log_tail()}",
                reason=NOT_READY,
            )
        if "address" not in self.ready:
            raise self.exit_error()
        return self.address

    def exit_error(self) -> UnavailableError:
        """Return the error for a process that has ended without being stopped. It contains the
        process's failure reason or the end of its log."""
        status = None if self._process is None else self._process.wait()
        self._said.wait(_LAST_WORDS_S)
        why = f": {self.failure}" if self.failure else self.log_tail()
        return UnavailableError(f"{self.name} ended {_describe(status)}{why}", reason="CHILD_DIED")

    def log_tail(self) -> str:
        """Return the end of the process's log for error messages, or "" if there is no log."""
        if self._log_file is None or not self._log_file.is_file():
            return ""
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "; its log ends with:\n  " + "\n  ".join(lines[-_TAIL_LINES:]) if lines else ""

    def request_stop(self) -> None:
        """Send SIGTERM to the process if it runs. Does not wait."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its children. Does not wait."""
        if self.exit_status is None and self._process is not None:
            # The process leads its own process group, whose id is not reused before the process
            # is reaped.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Stop the process with SIGTERM, and after a timeout with SIGKILL; idempotent."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            # A process that hangs in a system call ends when the call does; do not wait for it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self._process = None
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _read(self, process: subprocess.Popen[str], said: threading.Event) -> None:
        assert process.stdout is not None
        # Only this thread closes stdout: a close elsewhere would wait until this read ends.
        with contextlib.suppress(ValueError, OSError), process.stdout:
            for line in process.stdout:
                message = _parse(line)
                if message.get("event") == "ready" and process is self._process:
                    self.ready = message
                    self._listen = message.get("address", self._listen)
                    said.set()
                elif message.get("event") == "failed" and process is self._process:
                    self.failure = message.get("reason", "")
        said.set()


def check_running(processes: Iterable[ChildProcess]) -> None:
    """Raise UnavailableError if one of the processes has ended without being stopped. The error
    contains the process's failure reason or the end of its log."""
    for process in processes:
        if process.exit_status is not None:
            raise process.exit_error()


def _describe(status: int | None) -> str:
    if status is None or status >= 0:
        return f"with status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"


def _parse(line: str) -> dict[str, str]:
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}
