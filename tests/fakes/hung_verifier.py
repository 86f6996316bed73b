"""The verifier whose engine thread hangs in a round once SIGUSR1 came, and which says nothing of
sessions that are opened once SIGUSR2 came: it takes them, and the engine never hears of them."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from outrider_verifier import __main__ as verifier
from outrider_verifier.engine.loop import EngineLoop
from outrider_verifier.model_runner.cpu_runner import CpuModelRunner
from outrider_verifier.state.commands import Command, OpenSession

HANGS, SILENT = threading.Event(), threading.Event()
_submit, _post = CpuModelRunner.submit_round, EngineLoop.post_command


def submit(self: CpuModelRunner, *args: Any) -> Any:
    if HANGS.is_set():
        threading.Event().wait()
    return _submit(self, *args)


def post(self: EngineLoop, command: Command) -> None:
    if not (SILENT.is_set() and isinstance(command, OpenSession)):
        _post(self, command)


if __name__ == "__main__":
    CpuModelRunner.submit_round = submit  # type: ignore[method-assign]
    EngineLoop.post_command = post  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: HANGS.set())
    signal.signal(signal.SIGUSR2, lambda *_: SILENT.set())
    sys.exit(verifier.main())
