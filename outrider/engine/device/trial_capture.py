# mypy: disable-error-code="no-untyped-call"
"""Trial captures: they record which kernels a graph needs, execute nothing, and are discarded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import torch

T = TypeVar("T")
_CAPTURE_MODE: Final = "relaxed"
"""Capture mode of CUDA. It allows calls that a function makes on its first run, such as the
allocation of host memory or the loading of a library."""


class TrialCapture:
    """Captures functions into CUDA graphs on a separate stream and discards the graphs.

    The tensors that a function returns have a shape and an address, but undefined values. Memory
    that must outlast the capture is allocated within `outside_capture`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """The first graph, which keeps the memory pool of all graphs alive."""
        # Some steps launch nothing on some inputs.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        # If torch made this handle within a capture, it would wait for the device.
        torch.cuda.current_blas_handle()

    def record(self, function: Callable[[], T]) -> T:
        """Capture `function` and return its results. Raises RuntimeError if it cannot be
        captured."""
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
    """Return a context in which tensors can be made that outlast the capture in progress, if there
    is one.

    Memory that is allocated during a capture belongs to the graph, and operations that fill it are
    only recorded. This context therefore uses the default stream, which is not captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            yield
    else:
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Return a context in which Python's garbage collector is disabled, because freeing device
    memory would invalidate a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
