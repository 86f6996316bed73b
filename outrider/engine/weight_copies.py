"""Copies of weights by threads in the background, beside the compilation of kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Final

NUM_THREADS: Final = 4
"""Threads that copy: one alone waits for the pages of the file more than it copies."""


class WeightCopies:
    """The copies that fill the weights of a model.

    They are added while the model is built, run by `NUM_THREADS` threads from `start` on, and over
    when `wait` has returned. The threads only read files and write the weights: kernels compile
    and graphs are captured meanwhile, but nothing that reads a weight may run.
    """

    def __init__(self) -> None:
        self._copies: list[Callable[[], object]] = []
        self._futures: list[Future[object]] = []
        self._began = self._ended = 0.0

    def add(self, copy: Callable[[], object]) -> None:
        """Add a copy, to be called once by any thread."""
        self._copies.append(copy)

    def start(self) -> None:
        """Begin to copy."""
        self._began = self._ended = time.monotonic()
        threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")
        self._futures = [threads.submit(self._run, copy) for copy in self._copies]
        self._copies = []
        threads.shutdown(wait=False)

    def check(self) -> None:
        """Raise the error of a copy that has failed, without waiting for the others to end."""
        done = [future for future in self._futures if future.done() and not future.cancelled()]
        if any(future.exception() for future in done):
            self.wait()

    def wait(self) -> None:
        """Wait for all copies. Raises the error of the first one that failed, once none runs any
        more."""
        wait(self._futures, return_when=FIRST_EXCEPTION)
        for future in self._futures:
            future.cancel()
        wait(self._futures)
        for future in self._futures:
            if not future.cancelled():
                future.result()

    @property
    def seconds(self) -> float:
        """Time from the start to the end of the last copy so far, in seconds."""
        return self._ended - self._began

    def _run(self, copy: Callable[[], object]) -> None:
        copy()
        self._ended = time.monotonic()
