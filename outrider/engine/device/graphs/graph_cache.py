"""Cache of CUDA graphs, one for each key, with an eager mode of the same code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from outrider.engine.device.transfer.cuda_driver import driver_for
from outrider.engine.device.trial_capture import TrialCapture, no_collection
from outrider.watchdog import unbounded_step

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CAPTURE_MODE: Final = "thread_local"
"""Capture mode of CUDA that lets other threads make any CUDA call during a capture."""


class GraphCache:
    """Captures and replays functions of static tensors, with one CUDA graph per key.

    A function may read only tensors with a fixed address, must not wait for the device and must not
    read values on the host. Its results (a tensor, or nested tuples of tensors and None) are
    overwritten by every run.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.sealed = False
        """Whether functions of new keys run eagerly instead of being captured."""
        self._calls = driver_for(device)
        self._captured: dict[Hashable, tuple[Any, Any, torch.cuda.CUDAGraph]] = {}
        """By key: the prepared graph for `DriverInterface.launch`, the static results, and the
        graph that owns both."""
        self._missed: set[Hashable] = set()
        """Keys that were requested after `sealed` was set and are not captured."""
        self._pool: Any = None
        self._trial: TrialCapture | None = None
        """Trial capture that replaces captures of this cache; None if there is none."""

    def __len__(self) -> int:
        return len(self._captured)

    @contextmanager
    def capture_by(self, trial: TrialCapture) -> Iterator[None]:
        """Return a context in which `run_graph` passes functions of new keys to `trial`, which
        captures them and discards the graphs. These functions are not executed, and the cache does
        not change."""
        self._trial = trial
        try:
            yield
        finally:
            self._trial = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run_graph(self, key: Hashable, fn: Callable[[], T]) -> T:
        """Run the graph of `key` and return the results of `fn`. With graphs enabled, every call
        for a key returns the same tensors.

        The first call for a key runs `fn` eagerly, which also compiles the kernels, and captures
        the graph afterwards. A capture executes nothing, so effects happen once.
        """
        if not self.enabled:
            return fn()
        entry = self._captured.get(key)
        if entry is None:
            if self._trial is not None:
                return self._trial.record(fn)
            return self._run_uncaptured(key, fn) if self.sealed else self._first_run(key, fn)
        prepared, static, _ = entry
        self._calls.launch(prepared)
        result: T = static
        return result

    def _run_uncaptured(self, key: Hashable, fn: Callable[[], T]) -> T:
        if key not in self._missed:
            self._missed.add(key)
            # Compiling the kernels may block all sessions for seconds.
            logger.warning("no graph was captured for this", extra={"key": str(key)})
            with unbounded_step():
                return fn()
        return fn()

    def _first_run(self, key: Hashable, fn: Callable[[], T]) -> T:
        for _ in self.capture_steps(key, fn):
            pass
        static: T = self._captured[key][1]
        return static

    def capture_steps(self, key: Hashable, fn: Callable[[], T]) -> Iterator[None]:
        """Return an iterator that does the work of the first `run_graph` call for a key in two
        steps, one in each iteration. Once the kernels are compiled, a step takes some milliseconds.

        A thread can do other work between the steps. The iterator does nothing if graphs are
        disabled or the key is already captured.
        """
        if not self.enabled or key in self._captured:
            return
        if self._trial is not None:
            self._trial.record(fn)
            return
        # Results of a function may have been made in inference mode, so they are written in it.
        with torch.inference_mode(), unbounded_step():
            eager = fn()
        yield
        with torch.inference_mode(), unbounded_step():
            graph, static = self._capture(fn)
            for to, source in zip(_tensors(static), _tensors(eager), strict=True):
                to.copy_(source)
        self._captured[key] = (self._calls.prepare(graph), static, graph)

    def _capture(self, fn: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (a drafter's, a server's) may use the device meanwhile.
        with no_collection(), _capturing(graph, self._pool):
            static = fn()
        return graph, static


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the kernels launched within this context.

    torch's own context waits for the whole device. A thread with its own current stream must not do
    that, because other streams may wait for a peer; it therefore captures its stream directly.
    """
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=_CAPTURE_MODE):
            yield
        return
    graph.capture_begin(pool=pool, capture_error_mode=_CAPTURE_MODE)
    try:
        yield
    finally:
        graph.capture_end()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
