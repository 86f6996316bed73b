"""The drafting thread: the only one that accesses sessions and models."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from outrider import timeline
from outrider.engine.device.current_device import init_launching_thread
from outrider.engine.device.transfer.pinned_memory import pin_memory
from outrider.transport.pollable_queue import PollableQueue
from outrider.transport.shm import ShmChannel
from outrider.watchdog import Progress
from outrider_drafter.server.draft_engine import (
    ConnectionClosed,
    DraftEngine,
    OutgoingProposals,
    SessionMessage,
)
from outrider_drafter.server.shm_channels import ReplicaTable, VerifierShmChannels
from outrider_drafter.state.fair_share import MAX_POLLS, FairQueue

logger = logging.getLogger(__name__)

Deliver = Callable[[OutgoingProposals], None]
"""Sends proposals that are ready together to verifiers without a shared-memory channel. Called on
the drafting thread; must not block."""

READY_WAIT_S = 0.00003
"""Maximum duration in seconds of a poll that counts as not waiting, because its messages must have
arrived earlier."""
YIELD_INTERVAL_S = 0.0001
"""Maximum seconds that the drafting thread sleeps after handing proposals to the sending thread,
which needs the interpreter lock. A message ends the sleep."""


class DraftLoop:
    """Runs a `DraftEngine` on a thread of its own.

    Each turn of the loop takes in all waiting messages, does one step of building a replica if one
    is requested, and makes all wanted drafts. If no draft is wanted, it drafts for possible
    outcomes until a message arrives, or writes metrics, or processes new tokens and features of one
    session. Verdicts that arrive together, or while a batch runs, are drafted together. The thread
    ends when it is stopped or when a device is lost.
    """

    def __init__(
        self,
        engine: DraftEngine,
        deliver: Deliver,
        *,
        on_lost: Callable[[], None],
        on_shm_channel_lost: Callable[[int], None] = lambda _: None,
        max_unsent: int = 256,
        device: str = "cpu",
        replicas: ReplicaTable | None = None,
    ) -> None:
        """Create the loop; call `start` to run it.

        `device`: torch device of the draft models. `replicas`: see `VerifierShmChannels`. `on_lost`
        is called on the drafting thread, as its last action, if a device is lost.
        `on_shm_channel_lost` is called with the connection whose shared-memory channel is lost.
        Neither callback may block. `max_unsent`: maximum number of messages that wait for a
        verifier that does not read.
        """
        self._engine = engine
        self._deliver = deliver
        on_device = torch.device(device)
        self._shm_channels = VerifierShmChannels(
            engine.metrics,
            max_unsent=max_unsent,
            on_lost=on_shm_channel_lost,
            pin=lambda memory: pin_memory(memory, on_device),
            replicas=replicas,
        )
        self._on_lost = on_lost
        self._device = device
        self._inbox: PollableQueue[tuple[int, Sequence[SessionMessage] | ShmChannel] | None] = (
            PollableQueue()
        )
        """(connection, messages or shared-memory channel) pairs for the thread. None wakes the
        thread so that it ends."""
        self._submitted: Counter[int] = Counter()
        """Number of messages submitted so far for each connection. Written by the submitting thread
        only."""
        self._taken: Counter[int] = Counter()
        """Number of submitted messages of each connection that the drafting thread has processed.
        Written by the drafting thread only."""
        self._untaken: FairQueue[SessionMessage] = FairQueue()
        """Messages taken out of the inbox but not processed yet. They stay here if processing an
        earlier message fails."""
        self._gives_way = False
        self.progress = Progress()
        """Progress counter of the thread, for the watchdog: turns of the loop, sent batches and
        layers of a forward pass."""
        self._is_idle = False
        """Whether the thread waits for a message because it has nothing else to do."""
        self._is_over = False
        """Whether the thread has ended because it was stopped or a device was lost."""
        self._stopping = False
        self._worker = threading.Thread(target=self._run, name="drafting", daemon=True)

    def backlog(self, connection: int) -> int:
        """Return the number of messages of a connection that the thread has not processed yet."""
        return self._submitted[connection] - self._taken[connection]

    @property
    def num_sessions(self) -> int:
        """Number of followed sessions."""
        return self._engine.num_sessions

    @property
    def has_work(self) -> bool:
        """Whether the thread has work to do or has died. May be read from any thread."""
        return not self._is_over and not (self._is_idle and len(self._inbox) == 0)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._worker.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def submit_messages(self, connection: int, *messages: SessionMessage) -> None:
        """Hand messages to the thread, which processes all of them before it drafts. Call this from
        one thread only."""
        self._submitted[connection] += len(messages)
        self._inbox.put_item((connection, messages))

    def submit_shm_channel(self, connection: int, shm_channel: ShmChannel) -> None:
        """Hand the thread a shared-memory channel, which then carries all messages from and to the
        connection's verifier. The thread closes the channel when the connection ends."""
        self._inbox.put_item((connection, shm_channel))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after its current batch and wait up to `timeout_s` seconds for it;
        idempotent."""
        self._stopping = True
        self._inbox.put_item(None)
        if self._worker.is_alive():
            self._worker.join(timeout_s)

    def _run(self) -> None:
        self.progress.bind()
        # OpenMP has a number of threads for each calling thread; this call makes torch set it.
        torch.get_num_threads()
        init_launching_thread(self._device)
        # Entered here once: as a decorator of a compiled generator it would be left as soon as
        # the generator was created (decision 48).
        with torch.inference_mode():
            self._serve()

    def _serve(self) -> None:
        while not self._stopping:
            self.progress.record_step()
            try:
                self._work()
            except Exception:
                # The other sessions must continue, whatever the error was.
                logger.exception("drafting thread: unexpected error")
                self._engine.check_devices()
            if self._engine.device_lost:
                self._on_lost()
                break
        self._is_over = True
        self._shm_channels.close()

    def _work(self) -> None:
        """Run one turn of the loop. Waits for a message if there is nothing else to do."""
        engine = self._engine
        self._take_in()
        for _ in range(MAX_POLLS):
            if not self._receive(self._wait_s()):
                break
            self._gives_way = False
            self._take_in()
        if self._stopping:
            return
        self._shm_channels.build_replica()
        if engine.has_wanted_drafts:
            began = timeline.now()
            for answers in engine.draft_wanted():
                timeline.mark_span("draft", began, len(answers))
                self._send(answers)
                began = timeline.now()
            return
        self._gives_way = False
        if engine.has_look_ahead_work:
            self._look_ahead()
        elif engine.has_pending_metrics:
            engine.update_metrics()
        elif engine.is_behind:
            engine.catch_up_session()

    def _look_ahead(self) -> None:
        """Draft for outcomes until all are drafted or a message waits, because a message may change
        the sessions."""
        ahead = self._engine.run_look_ahead()
        with contextlib.closing(ahead):
            for answers in ahead:
                self._send(answers)
                self._receive(0.0)
                if self._untaken or self._stopping:
                    return

    def _receive(self, wait_s: float | None) -> bool:
        """Wait up to `wait_s` seconds for messages, or without limit if None. Return whether any
        have arrived."""
        shm_channels = self._shm_channels
        began = timeline.now()
        self._is_idle = wait_s is None
        ready = self._inbox.wait_ready(
            shm_channels.poll_timeout(wait_s), shm_channels.readers, shm_channels.writers
        )
        self._is_idle = False
        # Messages that were there already arrived during other work. A poll without a wait does not
        # count as waiting, however long the interpreter lock delays it.
        self._engine.record_poll(waited=wait_s != 0.0 and timeline.now() - began > READY_WAIT_S)
        if wait_s != 0.0:
            timeline.mark_span("wait", began)
        shm_channels.flush()
        came = bool(ready)
        for entry in self._inbox.take_all():
            if entry is None:
                return False
            connection, content = entry
            came = True
            if isinstance(content, ShmChannel):
                shm_channels.attach_channel(connection, content)
                continue
            self._untaken.add_messages((connection, message) for message in content)
            if any(isinstance(message, ConnectionClosed) for message in content):
                shm_channels.detach_channel(connection)
        self._untaken.add_messages(shm_channels.receive_messages(ready))
        shm_channels.run_replicas()
        return came

    def _send(self, answers: OutgoingProposals) -> None:
        """Send messages by shared-memory channels and hand the remaining ones to `Deliver`."""
        self.progress.record_step()
        began = timeline.now()
        rest = self._shm_channels.send_answers(answers)
        if rest:
            self._deliver(rest)
            self._gives_way = True
        if answers:
            timeline.mark_span("send", began, len(answers))

    def _take_in(self) -> None:
        began, count = timeline.now(), 0
        for connection, message in self._untaken.take_messages():
            count += 1
            if not self._shm_channels.has_channel(connection):
                self._taken[connection] += 1
            self._engine.handle_message(connection, message)
        if count:
            timeline.mark_span("take in", began, count)

    def _wait_s(self) -> float | None:
        """Return how many seconds to wait for a message, or None to wait without limit because
        there is no other work."""
        engine = self._engine
        if engine.has_wanted_drafts or self._untaken:
            return 0.0
        if self._gives_way:
            return YIELD_INTERVAL_S
        busy = engine.has_look_ahead_work or engine.has_pending_metrics or engine.is_behind
        return 0.0 if busy else None
