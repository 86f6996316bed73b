"""Mask computation on worker threads; a job that exceeds its time budget is abandoned.

The library cannot be interrupted, and one mask of an ambiguous grammar takes up to a second. Masks
that may be expensive are therefore computed on a worker thread, and the caller stops waiting once a
mask has taken its budget of processor time. Time in which the worker waits for a core does not
count.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from outrider.grammar.limits import MaskLimits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SLOW_SHARE: Final = 0.1
"""A mask is slow if it takes more than this share of the budget of one mask
(`MaskMeter.mask_s`)."""
MAX_WALL_FACTOR: Final = 40.0
"""Multiple of the budget of one mask, in wall-clock time, after which a job is abandoned. It does
not depend on the processor time that the mask has taken, so that no caller waits forever."""
_POLL_S: Final = 0.005
"""Time between two reads of a worker's processor time while a caller waits for masks, in
seconds."""


def worker_threads() -> int:
    """Return the number of threads that compute masks at the same time: half of the cores, at most
    8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    return min(8, max(1, cores // 2))


class MaskMeter:
    """Measures the time that the masks of one session take, and compares it with `MaskLimits`."""

    def __init__(self, limits: MaskLimits, *, may_be_ambiguous: bool) -> None:
        """Create the meter of a session.

        `may_be_ambiguous`: whether the grammar is written in a language for context-free grammars,
        so that it may be ambiguous and its masks expensive.
        """
        self._limits, self._may_be_ambiguous = limits, may_be_ambiguous
        self.mask_s = limits.mask_ms * 1e-3
        """Budget of one mask, in seconds of processor time."""
        self.is_alone = may_be_ambiguous
        """Whether the session's masks are computed by a `MaskJob` of its own instead of together
        with those of other sessions."""
        self.is_slow = False
        """Whether the session's latest masks were slow. Rounds then run without the session while
        its masks are computed."""
        self._slow_s = 0.0

    def record_joint(self, seconds: float) -> None:
        """Record that the masks of this session and others, computed in one call, took
        `seconds`."""
        self.is_alone |= seconds > self.mask_s

    def record_consumption(self, seconds: float) -> str:
        """Record that the matcher took `seconds` to consume a token. Returns the reason why the
        session must end, or an empty text if it may continue."""
        if seconds > SLOW_SHARE * self.mask_s:
            self._slow_s += seconds
        return self._check_session()

    def record(self, job: MaskJob) -> str:
        """Record the times that a job has measured. Returns the reason why the session must end, or
        an empty text if it may continue."""
        if job.is_late or job.longest_s > self.mask_s:
            return f"a mask took more than {self._limits.mask_ms:g} ms"
        self.is_slow = job.longest_s > SLOW_SHARE * self.mask_s
        self.is_alone = self._may_be_ambiguous or self.is_slow
        self._slow_s += job.slow_s
        return self._check_session()

    def _check_session(self) -> str:
        if self._slow_s > self._limits.session_s:
            return f"its slow masks took more than {self._limits.session_s:g} s together"
        return ""


class MaskJob:
    """Mask computation of one matcher, which no other thread may use until the job is done."""

    def __init__(
        self,
        matcher: LLMatcher,
        meter: MaskMeter,
        words: int,
        *,
        output: Sequence[int] = (),
        drafts: Sequence[int] = (),
    ) -> None:
        """Create a job.

        The matcher first consumes the tokens `output`, then computes masks along the tokens
        `drafts`. At the end only `drafts` are undone. `words` is the number of 32-bit words of a
        mask.
        """
        self._matcher, self._mask_s = matcher, meter.mask_s
        self._output, self._drafts = list(output), list(drafts)
        self.masks = np.full((1 + len(self._drafts), words), 0xFFFFFFFF, dtype=np.uint32)
        """Masks after `output` and after each draft token that may follow, uint32 [1 + k, W]."""
        self.num_output = len(self._output)
        self.consumed = 0
        """Number of tokens of `output` that the grammar allowed."""
        self.longest_s = self.slow_s = 0.0
        """Processor time of the longest mask and of all slow masks together, in seconds."""
        self.is_late = False
        """Whether the job was abandoned because it took too long. The matcher and masks of an
        abandoned job must not be used any more."""
        self.done = threading.Event()
        self._clock: int | None = None
        self._began = self._began_wall = 0.0
        """Start of the current mask: processor time of the worker, and wall-clock time."""
        self._is_running = False

    def run(self) -> None:
        """Compute the masks. A thread of `MaskWorkers` calls this."""
        try:
            if hasattr(time, "pthread_getcpuclockid"):
                self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._compute()
        finally:
            self._is_running = False
            self.done.set()

    def _compute(self) -> None:
        self._began, self._began_wall, self._is_running = self._now(), time.monotonic(), True
        if self._output:
            self.consumed = consume_without_lock(self._matcher, self._output)
            if self.consumed < len(self._output):
                return
            self._began, self._began_wall = self._now(), time.monotonic()
        entered = 0
        for depth, mask in enumerate(self.masks):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            now = self._now()
            took, self._began, self._began_wall = now - self._began, now, time.monotonic()
            self.longest_s = max(self.longest_s, took)
            self.slow_s += took if took > SLOW_SHARE * self._mask_s else 0.0
            if depth == len(self._drafts) or self.is_late or self._matcher.is_error():
                break
            token = self._drafts[depth]
            if not int(mask[token >> 5]) >> (token & 31) & 1:
                break
            if not self._matcher.try_consume_tokens([token]):
                break
            entered += 1
        if entered and not self._matcher.is_error():
            self._matcher.rollback(entered)

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def check_late(self) -> bool:
        """Abandon the job if its current mask has exceeded its budget.

        Returns whether the job is abandoned.
        """
        if self.done.is_set() or not self._is_running or self.is_late:
            return self.is_late
        waited_s = time.monotonic() - self._began_wall
        if waited_s > MAX_WALL_FACTOR * self._mask_s:
            self.is_late = True
        elif waited_s > self._mask_s:
            # The worker's clock is there until it is done.
            try:
                self.is_late = self._now() - self._began > self._mask_s
            except OSError:
                return False
        return self.is_late


class MaskWorkers:
    """Worker threads that run jobs in the order in which they were started. A thread whose job is
    abandoned is replaced."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[MaskJob] = queue.SimpleQueue()
        self._missing = threads
        self._lock = threading.Lock()

    def start(self, job: MaskJob) -> None:
        """Put a job into the queue of the worker threads, without waiting for it."""
        self._jobs.put(job)
        with self._lock:
            missing, self._missing = self._missing, 0
        for _ in range(missing):
            threading.Thread(target=self._work, name="masks", daemon=True).start()

    def wait(self, job: MaskJob) -> None:
        """Wait until a job is done or abandoned."""
        while not job.done.wait(_POLL_S):
            if self.check_late(job):
                return

    def check_late(self, job: MaskJob) -> bool:
        """Abandon a job if its current mask has exceeded its budget. Returns whether the job is
        abandoned."""
        if job.is_late or not job.check_late():
            return job.is_late
        with self._lock:
            self._missing += 1
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            if job.is_late:
                return


def consume_without_lock(matcher: LLMatcher, tokens: Sequence[int]) -> int:
    """Let a matcher consume tokens as far as its grammar allows, without holding the interpreter
    lock.

    Returns the number of tokens consumed. The matcher's own methods would hold the lock, so that no
    other thread could run.
    """
    executor = _consuming_executor()
    for count, token in enumerate(tokens):
        if not executor.consume_token_par([(matcher, token)])[0]:
            return count
    return len(tokens)


@functools.cache
def _consuming_executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(worker_threads())


@functools.cache
def round_workers() -> MaskWorkers:
    """Return the workers for masks that a round waits for."""
    return MaskWorkers(worker_threads())


@functools.cache
def background_workers() -> MaskWorkers:
    """Return the workers for masks of sessions that skip rounds until their masks are ready."""
    return MaskWorkers(worker_threads())
