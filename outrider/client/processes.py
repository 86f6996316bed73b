"""Child processes that say {"event": "ready", "address": ...} on stdout when they serve."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

from outrider.errors import UnavailableError

STOP_S = 5.0
"""Time that a process with nothing left to do gets to stop before it is killed."""
NOT_READY = "CHILD_NOT_READY"
"""Reason of the error of a process that takes longer than was waited."""
_TAIL_LINES = 12
_LAST_WORDS_S = 1.0
"""Time to read what a process that has ended wrote before."""


class ChildProcess:
    """One `python -m MODULE ARGS`; it cannot outlive this process."""

    def __init__(
        self,
        name: str,
        module: str,
        args: Sequence[str],
        *,
        listen: str = "127.0.0.1:0",
        log_dir: Path | None = None,
    ) -> None:
        """Its stderr goes to `log_dir`/`name`.log, or to our own stderr without a `log_dir`.

        `listen` is where it shall serve; once it has taken a free port it keeps it when it is
        started again.
        """
        self.name = name
        self._command = [sys.executable, "-m", "outrider.client.child", module, *args]
        self._listen = listen
        self._log_file = None if log_dir is None else log_dir / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._said = threading.Event()
        self.ready: dict[str, str] = {}
        """What it said when it began to serve."""
        self.failure = ""
        """The reason that it gave when it failed."""

    @property
    def address(self) -> str:
        """Where it serves; known once it is ready."""
        return self.ready["address"]

    @property
    def pid(self) -> int | None:
        """Process id while there is a process."""
        return None if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it (again)."""
        self.close()
        self._said = threading.Event()
        self.ready = {}
        self.failure = ""
        log: IO[str] | None = None
        if self._log_file is not None:
            log = self._log_file.open("a", encoding="utf-8")
        with contextlib.ExitStack() as stack:
            if log is not None:
                stack.enter_context(log)
            self._process = subprocess.Popen(
                [*self._command, "--listen", self._listen],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C in a terminal is ours to handle: children are stopped in order.
                start_new_session=True,
            )
        reader = threading.Thread(target=self._read, args=(self._process, self._said), daemon=True)
        reader.start()

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until it serves; its address. UnavailableError, with its last words, if not."""
        if not self._said.wait(timeout_s):
            raise UnavailableError(
                f"{self.name} was not ready after {timeout_s:g} s{self.last_words()}",
                reason=NOT_READY,
            )
        if "address" not in self.ready:
            raise self.died()
        return self.address

    def died(self) -> UnavailableError:
        """The error of a process that ended by itself, with the reason that it gave."""
        status = None if self._process is None else self._process.wait()
        self._said.wait(_LAST_WORDS_S)
        why = f": {self.failure}" if self.failure else self.last_words()
        return UnavailableError(f"{self.name} ended {_describe(status)}{why}", reason="CHILD_DIED")

    def last_words(self) -> str:
        """The end of its log, for error messages."""
        if self._log_file is None or not self._log_file.is_file():
            return ""
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "; its log ends with:\n  " + "\n  ".join(lines[-_TAIL_LINES:]) if lines else ""

    def ask_to_stop(self) -> None:
        """Send SIGTERM, if it runs, and do not wait."""
        if self._process is not None:
            self._process.terminate()

    def close(self) -> None:
        """Stop it: asked first, killed after a while; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, process: subprocess.Popen[str], said: threading.Event) -> None:
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed while being read
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
    """UnavailableError, with its last words, where one of these has ended by itself."""
    for process in processes:
        if process.exit_status is not None:
            raise process.died()


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
