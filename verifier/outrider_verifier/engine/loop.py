"""The engine thread: takes commands, runs rounds, hands effects to the asyncio thread.

Commands are taken whenever a round was submitted or finished, even if another round is in flight.
The thread ends when it is stopped or when the device is lost. If the device is lost, every session
fails with DEVICE_LOST, and `remaining_commands` returns the commands that arrive afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from outrider import timeline
from outrider.errors import InternalError, OutriderError
from outrider.spec.plan import MAX_PROPOSAL_TIMEOUT_MS
from outrider.transport.pollable_queue import PollableQueue
from outrider.watchdog import Progress
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.failure_handler import device_lost_error
from outrider_verifier.engine.round_executor import RoundExecutor
from outrider_verifier.exchange.shm_channels import DrafterShmChannels
from outrider_verifier.state.commands import (
    Command,
    DrafterAttached,
    DrafterDetached,
    ReplicaAnswered,
    StopEngine,
)
from outrider_verifier.state.effects import CompleteCommand
from outrider_verifier.state.round_plan import RoundPlan

if TYPE_CHECKING:
    # It imports Triton, which a verifier on a CPU can do without.
    from outrider_verifier.exchange.device_exchange import DeviceExchange

logger = logging.getLogger(__name__)

MAX_PROPOSAL_WAIT_S = MAX_PROPOSAL_TIMEOUT_MS / 1000.0
"""Maximum time without a round, in seconds, for which waiting for proposals counts as progress."""
WAIT_SLICE_S = 1.0
"""Maximum length of a single wait for commands, in seconds, while there are sessions. The end of
each wait counts as a step of progress."""


class EngineLoop:
    """Manages the engine thread, which owns the core, takes commands and runs rounds.

    After a round its verdicts are sent first, then its other effects.
    """

    def __init__(
        self,
        core: EngineCore,
        rounds: RoundExecutor,
        shm_channels: DrafterShmChannels,
        *,
        on_lost: Callable[[], None],
        exchange: DeviceExchange | None = None,
    ) -> None:
        """Create a loop whose thread is not started. `exchange` is the device exchange, if it is
        enabled. `on_lost` is called on the engine thread, at most once, after the device was lost
        and all effects were passed on. After this call the thread takes no more commands."""
        self._core = core
        self._rounds = rounds
        self._outbox = core.outbox
        self._shm_channels = shm_channels
        self._on_lost = on_lost
        self._exchange = exchange
        self._failing = rounds.failing
        self.progress = Progress()
        """Counter of the thread's steps: rounds, layers of a forward pass, waits for proposals."""
        self._idle_steps = 0
        """Number of steps of `progress` that were waits without a session."""
        self._patient_until = 0.0
        """Time until which waiting without a round counts as progress."""
        self._commands: PollableQueue[Command] = PollableQueue()
        self._stopping = False
        self._worker = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def post_command(self, command: Command) -> None:
        """Queue a command. Any thread may call this."""
        self._commands.put_item(command)

    @property
    def backlog(self) -> int:
        """Number of commands that the engine thread has not taken yet. Any thread may read this."""
        return len(self._commands)

    def stop(self, timeout_s: float) -> None:
        """Fail all sessions and stop the thread, waiting up to `timeout_s` seconds for the rounds
        in flight."""
        self.post_command(StopEngine())
        self._worker.join(timeout_s)

    def remaining_commands(self) -> list[Command]:
        """Return the commands that the thread did not take. Call this after the thread has
        ended."""
        return self._commands.take_all()

    @property
    def has_work(self) -> bool:
        """Whether the engine thread has sessions to serve or commands to take. Any thread may read
        this."""
        return self._core.num_sessions > 0 or self.backlog > 0

    @property
    def session_steps(self) -> int:
        """Number of steps of `progress`, except waits while no session was open. Any thread may
        read this."""
        return self.progress.steps - self._idle_steps

    def _run(self) -> None:
        self.progress.bind()
        # Entered once per thread: without inference mode every copy passes through autograd.
        with torch.inference_mode():
            self._rounds.enter_thread()
            self._serve()

    def _serve(self) -> None:
        wait_until: float | None = None
        idle_since = time.monotonic()
        while not (self._stopping or self._outbox.is_closed or self._failing.device_lost):
            awaited = wait_until is not None
            idle = awaited or not self._core.sessions
            taken = self._take_commands(wait_until, block=idle)
            if self._failing.device_lost:
                break
            if awaited and not taken and self._rounds.is_held_round_finished:
                # No command has arrived since the last plan, so the next plan needs the round's
                # outcome.
                self._rounds.finish_round(go_on=True)
                wait_until, idle_since = None, time.monotonic()
                self._outbox.flush_unless_held()
                continue
            if self._exchange is not None:
                self._exchange.check()
            woken = time.monotonic()
            began = timeline.now()
            plan = self._guarded_plan(woken)
            timeline.mark_span("plan", began)
            wait_until = plan.wait_until
            if not plan.is_empty:
                self._outbox.flush_unless_held()
                waited_s = woken - idle_since if awaited else 0.0
                self._rounds.run_round(plan, waited_s=waited_s, spent_s=time.monotonic() - woken)
                idle_since = time.monotonic()
                self._patient_until = idle_since + MAX_PROPOSAL_WAIT_S
            else:
                self._outbox.flush()
                if self._rounds.has_round_in_flight and (
                    wait_until is None or self._rounds.is_round_finished
                ):
                    self._rounds.finish_round(go_on=True)
                    wait_until, idle_since = None, time.monotonic()
            self._outbox.flush_unless_held()
        # No work may be left running on a device after the thread ends.
        self._rounds.finish_round()
        if self._exchange is not None:
            self._exchange.close()
        self._shm_channels.close()
        if self._failing.device_lost:
            self._drop_all(device_lost_error())
        self._outbox.flush()
        if self._failing.device_lost:
            self._on_lost()

    def _take_commands(self, wait_until: float | None, *, block: bool) -> bool:
        """Handle all commands that have arrived. If `block`, wait for a command until `wait_until`.
        Return whether there was any command."""
        shm_channels = self._shm_channels
        readers = shm_channels.readers
        ready: set[int] = set()
        began = timeline.now()
        if block:
            self._outbox.flush()
        if block or readers:
            timeout = shm_channels.poll_timeout(self._timeout(wait_until) if block else 0.0)
            ready = self._commands.wait_ready(timeout, readers, shm_channels.writers)
            if block:
                self._record_wait()
            while block and self._rounds.has_round_in_flight and not (ready or len(self._commands)):
                if (
                    self._rounds.is_round_finished
                    or wait_until is None
                    or time.monotonic() >= wait_until
                ):
                    break
                ready = self._commands.wait_ready(
                    self._rounds.poll_delay_s, readers, shm_channels.writers
                )
            shm_channels.flush()
        if block:
            timeline.mark_span("wait", began)
        began = timeline.now()
        posted = self._commands.take_all()
        for command in posted:
            self._guarded_handle(command)
        by_shm_channel = shm_channels.receive_commands(ready)
        for command in by_shm_channel:
            self._guarded_handle(command)
        if posted or by_shm_channel:
            timeline.mark_span("take in", began, len(posted) + len(by_shm_channel))
        return bool(posted or by_shm_channel)

    def _timeout(self, wait_until: float | None) -> float | None:
        """Return the timeout of the first wait, in seconds; None for no limit. It is 0 with a round
        in flight, since the device does not signal the round's end."""
        if self._rounds.has_round_in_flight:
            return 0.0
        if wait_until is None:
            return None
        return min(WAIT_SLICE_S, max(0.0, wait_until - time.monotonic()))

    def _record_wait(self) -> None:
        """Count a wait as progress. It is not counted if a round is in flight, or if sessions have
        had no round for longer than the maximum proposal timeout."""
        now = time.monotonic()
        if not self._core.sessions:
            self._patient_until = now + MAX_PROPOSAL_WAIT_S
            self._idle_steps += 1
        if not self._rounds.has_round_in_flight and now < self._patient_until:
            self.progress.record_step()

    def _guarded_handle(self, command: Command) -> None:
        match command:
            case StopEngine():
                self._stopping = True
            case DrafterAttached(link=link, shm_channel=lane) if lane is not None:
                self._shm_channels.attach_drafter(link, lane)
                if self._exchange is not None:
                    self._exchange.add_drafter(link)
            case DrafterDetached(link_id=link_id):
                if self._exchange is not None:
                    self._exchange.remove_drafter(link_id)
                self._shm_channels.detach_channel(link_id)
            case ReplicaAnswered(link_id=link_id, answer=answer):
                if self._exchange is not None:
                    self._exchange.take_answer(link_id, answer)
        posted = len(self._outbox.effects)
        try:
            self._core.handle_command(command, time.monotonic())
        except Exception as bug:
            self._give_up(bug)
        effects = self._outbox.effects
        for place, effect in enumerate(effects[posted:], posted):
            if isinstance(effect, CompleteCommand) and isinstance(effect.error, InternalError):
                effects[place] = self._command_error(effect, effect.error)

    def _command_error(self, answer: CompleteCommand, bug: InternalError) -> CompleteCommand:
        """Return the answer to a failed command: DEVICE_LOST if the device has failed, else
        `answer` itself."""
        self._failing.check_device(bug)
        return (
            CompleteCommand(answer.future, device_lost_error())
            if self._failing.device_lost
            else answer
        )

    def _guarded_plan(self, now: float) -> RoundPlan:
        try:
            return self._rounds.plan_round(now)
        except Exception as bug:
            self._give_up(bug)
            return RoundPlan()

    def _give_up(self, bug: Exception) -> None:
        """Drop all sessions after an unexpected error, since the state may be inconsistent; the
        loop continues."""
        logger.exception("engine failed; all sessions are dropped")
        self._failing.check_device(bug)
        error: OutriderError = InternalError(f"{type(bug).__name__}: {bug}", reason="ENGINE_FAILED")
        self._drop_all(device_lost_error() if self._failing.device_lost else error)

    def _drop_all(self, error: OutriderError) -> None:
        try:
            self._core.fail_all_sessions(error)
        except Exception:
            logger.exception("sessions could not be dropped cleanly")
            self._core.drop_all_sessions()
