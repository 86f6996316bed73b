# mypy: disable-error-code="no-untyped-call"
"""Captures that are thrown away: they show which kernels a graph needs, and execute nothing."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

T = TypeVar("T")
_CAPTURE_MODE: Final = "relaxed"
"""What a function does for the first time (memory for its results on the host, a library that is
loaded) is allowed within the capture, too."""


class TrialCapture:
    """Captures functions in a stream of its own and throws the graphs away.

    What a function returns has memory and shape, but no value. Memory that outlasts the capture is
    made within `outside_capture`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """The first graph, which keeps the memory of all until it is dropped with this."""
        # Some steps launch nothing on some inputs.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        # Made within a capture, it would wait for the device.
        torch.cuda.current_blas_handle()

    def record(self, function: Callable[[], T]) -> T:
        """Capture `function`; what it returned. Raises RuntimeError for what cannot be captured."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.inference_mode(), torch.cuda.stream(self._stream), no_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_MODE)
            try:
                return function()
            finally:
                graph.capture_end()
                self._first = self._first or graph


@contextmanager
def outside_capture(device: torch.device) -> Iterator[None]:
    """Make tensors that outlast the capture under way, if there is one, as if there were none.

    Memory that is allocated in a capture belongs to its graph, and what fills it is only recorded.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            yield
    else:
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from giving memory back, which would void a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
