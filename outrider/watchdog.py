"""Watchdog of a process's worker thread: detects pending work without a finished step.

The worker thread owns a `Progress` and counts its steps there. Code inside one long step (the
layers of a forward pass) finds the `Progress` of its thread through `record_step`, so that a long
step is distinguished from a hang. The watchdog measures time by its checks on the event loop, and
each check counts as the interval between checks, even if more time has passed. A process that was
stopped and continued therefore does not consider its worker thread hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

EXIT_STALLED = 3
"""Exit status of a process whose worker thread hung; its supervisor starts it again."""
EXIT_GRACE_S = 5.0
"""Time in seconds that a process whose worker thread hung has to inform its peers and shut down.
After this time the process ends at once."""
EXIT_NOTICE_S = 0.5
"""Time in seconds for which the health service of a process whose worker thread hung reports
NOT_SERVING to peers and probes before the port is closed."""
_LOOKS_PER_TIMEOUT = 40
_MAX_LOOK_S = 0.25

_current = threading.local()


class Progress:
    """Step counter of one worker thread. Only that thread changes it; any thread may read it."""

    __slots__ = ("_allowances", "steps", "thread_id")

    def __init__(self) -> None:
        self.steps = 0
        """Steps finished so far."""
        self.thread_id: int | None = None
        """Identifier of the worker thread, once it runs."""
        self._allowances = 0

    @property
    def is_unbounded(self) -> bool:
        """Whether the thread is inside `unbounded_step`."""
        return self._allowances > 0

    def bind(self) -> None:
        """Make this object the `Progress` of the calling thread, which is the worker thread."""
        self.thread_id = threading.get_ident()
        _current.progress = self

    def record_step(self) -> None:
        """Count one step."""
        self.steps += 1

    @contextlib.contextmanager
    def unbounded_step(self) -> Iterator[None]:
        """Exempt the code in the context, which counts as one step, from the watchdog's time limit.
        Use this for compilations and graph captures."""
        self._allowances += 1
        try:
            yield
        finally:
            self._allowances -= 1
            self.steps += 1

    def stack(self) -> str:
        """Return the present call stack of the thread as text, for the log. It is empty if the
        thread does not run."""
        if self.thread_id is None:
            return ""
        frame = sys._current_frames().get(self.thread_id)
        return "" if frame is None else "".join(traceback.format_stack(frame))


def record_step() -> None:
    """Count one step of the calling thread, if it is a watched worker thread."""
    progress = getattr(_current, "progress", None)
    if progress is not None:
        progress.steps += 1


def unbounded_step() -> contextlib.AbstractContextManager[None]:
    """Return the context `Progress.unbounded_step` of the calling thread, or a context that does
    nothing if the thread has no `Progress`."""
    progress: Progress | None = getattr(_current, "progress", None)
    return contextlib.nullcontext() if progress is None else progress.unbounded_step()


class Watchdog:
    """Calls `on_stall` once if a worker thread has work and finishes no step for `timeout_s`
    seconds."""

    def __init__(
        self,
        progress: Progress,
        *,
        has_work: Callable[[], bool],
        on_stall: Callable[[float], None],
        timeout_s: float,
    ) -> None:
        """Create a watchdog without starting it.

        `has_work` says whether the worker thread has work. `on_stall` is called on the event loop
        with the number of seconds without a step. `timeout_s` 0 disables the watchdog.
        """
        self._progress = progress
        self._has_work = has_work
        self._on_stall = on_stall
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start watching; idempotent."""
        if self._task is None and self._timeout_s > 0:
            self._task = asyncio.create_task(self._watch(), name="outrider-watchdog")

    def stop(self) -> None:
        """Stop watching; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _watch(self) -> None:
        look_s = min(_MAX_LOOK_S, self._timeout_s / _LOOKS_PER_TIMEOUT)
        steps, silent_s = self._progress.steps, 0.0
        while silent_s < self._timeout_s:
            await asyncio.sleep(look_s)
            moved = steps != self._progress.steps
            steps = self._progress.steps
            if moved or self._progress.is_unbounded or not self._has_work():
                silent_s = 0.0
            else:
                silent_s += look_s
        logger.critical(
            "worker thread stalled",
            extra={"silent_s": round(silent_s, 1), "stack": self._progress.stack()},
        )
        self._on_stall(silent_s)


def exit_within(seconds: float, status: int) -> None:
    """Start a timer that ends the process with exit status `status` after `seconds`, even if
    threads hang."""
    timer = threading.Timer(seconds, exit_now, (status,))
    timer.daemon = True
    timer.start()


def exit_now(status: int) -> None:
    """End the process with exit status `status` without waiting for its threads, because one of
    them hangs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)
