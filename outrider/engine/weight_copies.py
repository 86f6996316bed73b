"""Background threads that copy a model's weights while its kernels are compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Final

NUM_THREADS: Final = 4
"""Number of copy threads. A single thread would mostly wait for pages of the file."""


class WeightCopies:
    """Runs the copies that fill the weights of a model in background threads.

    The model loader adds copies while it builds the model. `start` runs them in `NUM_THREADS`
    threads, and `wait` returns when all are done. Until then kernels may be compiled and graphs
    captured, but no code may read a weight.
    """

    def __init__(self) -> None:
        self._copies: list[Callable[[], object]] = []
        self._futures: list[Future[object]] = []
        self._began = self._ended = 0.0

    def add(self, copy: Callable[[], object]) -> None:
        """Add a copy: a function that one of the threads calls once."""
        self._copies.append(copy)

    def start(self) -> None:
        """Start the copies in background threads."""
        self._began = self._ended = time.monotonic()
        threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")
        self._futures = [threads.submit(self._run, copy) for copy in self._copies]
        self._copies = []
        threads.shutdown(wait=False)

    def check(self) -> None:
        """Raise the error of a failed copy. Return immediately if no copy has failed."""
        done = [future for future in self._futures if future.done() and not future.cancelled()]
        if any(future.exception() for future in done):
            self.wait()

    def wait(self) -> None:
        """Wait for all copies. If a copy fails, cancel the copies that have not started, wait for
        those that run, and raise the error."""
        wait(self._futures, return_when=FIRST_EXCEPTION)
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        for future in self._futures:
            if not future.cancelled():
                future.result()

    @property
    def seconds(self) -> float:
        """Time from `start` to the end of the last finished copy, in seconds."""
        return self._ended - self._began

    def _run(self, copy: Callable[[], object]) -> None:
        copy()
        self._ended = time.monotonic()
