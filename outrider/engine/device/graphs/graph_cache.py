"""CUDA graph cache by key, with an eager mode of the same code."""

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
"""Other threads may make any call meanwhile."""


class GraphCache:
    """Captures and replays functions of static tensors, one CUDA graph a key.

    A function reads only tensors that stay where they are, never waits for the device and never
    looks at values on the host; what it returns (a tensor, or tuples of tensors and None) is
    written anew by every run.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self.enabled = enabled and device.type == "cuda"
        self.sealed = False
        """Whether nothing is captured any more: what is not, runs as it is."""
        self._calls = driver_for(device)
        self._captured: dict[Hashable, tuple[Any, Any, torch.cuda.CUDAGraph]] = {}
        """By key: what `DriverInterface.launch` takes, what a run returns, and what both belong
        to."""
        self._missed: set[Hashable] = set()
        """What was asked for since, and is not captured."""
        self._pool: Any = None
        self._trial: TrialCapture | None = None
        """What captures in this cache's place; None: nothing does."""

    def __len__(self) -> int:
        return len(self._captured)

    @contextmanager
    def capture_by(self, trial: TrialCapture) -> Iterator[None]:
        """Within this context what is not captured is recorded by `trial` and thrown away: nothing
        runs, and nothing is captured afterwards that was not before."""
        self._trial = trial
        try:
            yield
        finally:
            self._trial = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def run_graph(self, key: Hashable, fn: Callable[[], T]) -> T:
        """The outcome of `fn`; the same tensors for a key whenever graphs are on.

        The first call for a key runs eagerly, which also compiles the kernels, and captures the
        graph afterwards: a capture executes nothing, so effects happen once.
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
            # Compiling its kernels may hold everybody up for seconds.
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
        """What the first `run_graph` of a key does, in steps of some milliseconds each once the
        kernels are compiled; a thread that also serves others does so in between. Nothing, where
        graphs are off or the key is captured."""
        if not self.enabled or key in self._captured:
            return
        if self._trial is not None:
            self._trial.record(fn)
            return
        # In inference mode, because what a function returns may have been made in it.
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
    """Capture what is launched. A thread that has its own current stream shares the device with
    streams that may wait for a peer, so that it must not wait for the whole device, as torch's
    context does: it captures its stream as it is."""
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
    """Tensors of nested tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
