"""The drafting thread: the only one that touches sessions and models."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
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
        self._inbox: queue.SimpleQueue[tuple[int, SessionMessage] | None] = queue.SimpleQueue()
        """None wakes the thread to end it."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)

    @property
    def backlog(self) -> int:
        """Messages that wait for the thread."""
        return self._inbox.qsize()

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
        self._inbox.put((connection, message))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after its current batch; idempotent."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        # OpenMP keeps the number of threads by thread; being asked, torch sets it for this one.
        torch.get_num_threads()
        make_current(self._device)
        while not self._stopping:
            try:
                self._work()
            except Exception:
                # Whatever it was, the other sessions must go on.
                logger.exception("drafting thread: unexpected error")
                self._engine.check_devices()
            if self._engine.device_lost:
                self._on_lost()
                return

    def _work(self) -> None:
        """Take in all messages, waiting for one if there is nothing else to do, then do it."""
        engine = self._engine
        idle = not (engine.wants_drafting or engine.is_behind)
        with contextlib.suppress(queue.Empty):
            while (entry := self._inbox.get(block=idle)) is not None:
                idle = False
                engine.handle(*entry)
        if self._stopping:
            return
        if engine.wants_drafting:
            for connection, proposal in engine.draft():
                self._deliver(connection, proposal)
        elif engine.is_behind:
            engine.catch_up()
