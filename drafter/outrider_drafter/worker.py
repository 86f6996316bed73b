"""The drafting thread: the only one that touches sessions and models."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch

from outrider.engine.device.current import make_current
from outrider.wire.messages import Proposal
from outrider_drafter.engine import DraftEngine, SessionMessage

logger = logging.getLogger(__name__)

Deliver = Callable[[int, Proposal], None]
"""Takes (connection, proposal), on the drafting thread; must not block."""


class DraftWorker:
    """Runs a `DraftEngine`: all waiting messages, then all wanted drafts, then a little catch-up.

    Verdicts that arrive while a batch runs wait for its end and form the next batch together.
    The thread ends when it is stopped, or when a device is lost.
    """

    def __init__(
        self,
        engine: DraftEngine,
        deliver: Deliver,
        *,
        on_lost: Callable[[], None],
        device: str = "cpu",
    ) -> None:
        """`device` is where the models are. `on_lost` is called on the drafting thread, as the last
        thing it does, if a device is lost; it must not block."""
        self._engine = engine
        self._deliver = deliver
        self._on_lost = on_lost
        self._device = device
        self._inbox: deque[tuple[int, SessionMessage]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)

    @property
    def backlog(self) -> int:
        """Messages that wait for the thread."""
        return len(self._inbox)

    @property
    def num_sessions(self) -> int:
        """Sessions followed now."""
        return self._engine.num_sessions

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, connection: int, message: SessionMessage) -> None:
        """Hand a message to the thread."""
        with self._wake:
            self._inbox.append((connection, message))
            self._wake.notify()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after its current batch; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        # OpenMP keeps the number of threads by thread; being asked, torch sets it for this one.
        torch.get_num_threads()
        make_current(self._device)
        while self._wait():
            try:
                self._work()
            except Exception:
                # Whatever it was, the other sessions must go on.
                logger.exception("drafting thread: unexpected error")
                self._engine.check_devices()
            if self._engine.device_lost:
                self._on_lost()
                return

    def _wait(self) -> bool:
        """Sleep until there is work; False when the thread should end."""
        engine = self._engine
        with self._wake:
            while not (self._inbox or engine.wants_drafting or engine.is_behind or self._stopping):
                self._wake.wait()
        return not self._stopping

    def _work(self) -> None:
        engine = self._engine
        while self._inbox:
            engine.handle(*self._inbox.popleft())
        if engine.wants_drafting:
            for connection, proposal in engine.draft():
                self._deliver(connection, proposal)
        elif engine.is_behind:
            engine.catch_up()
