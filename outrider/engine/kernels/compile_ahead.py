"""Parallel compilation of the Triton kernels that are launched while nothing runs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Final, Self

import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime import driver

logger = logging.getLogger(__name__)

MAX_THREADS: Final = 16
"""Threads that compile. Triton compiles outside the interpreter lock but for about a sixth of the
time, so that more would wait for the lock."""


CompileKernel = Callable[[Any, dict[str, Any]], None]
"""Compiles a JIT function for a launch, as Triton's `jit_cache_hook` describes it."""


class KernelCompiler:
    """Context in which launches of kernels that are not compiled yet only queue their compilation.

    Threads compile each of them into Triton's cache on disk, with its launcher. The first launch
    after the context reads it from there. A launch within the context has no effect: use it where
    launches are not executed, as in the capture of a graph that is thrown away. It holds for the
    launches of all threads.
    """

    def __init__(self, compile_kernel: CompileKernel | None = None) -> None:
        """`compile_kernel`: compiles a kernel; None: into Triton's cache on disk."""
        self._compile = compile_kernel or _compile_to_cache
        self._threads = ThreadPoolExecutor(
            min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="compile"
        )
        self._kernels: dict[tuple[str, str], Future[None]] = {}
        self._compiled: list[str] = []
        """Kernels that were not in the cache; threads append."""
        self._num_known = 0
        self._hook_before: Any = None
        self._listener_before: Any = None

    @property
    def num_kernels(self) -> int:
        """Kernels that were queued so far."""
        return len(self._kernels)

    def wait_cached(self) -> bool:
        """Wait for the kernels that were queued so far; whether the cache on disk had all those
        that were queued since the last call."""
        before = self._num_known
        wait(list(self._kernels.values()))
        self._num_known = len(self._compiled)
        return self._num_known == before

    def __enter__(self) -> Self:
        self._hook_before = knobs.runtime.jit_cache_hook
        self._listener_before = knobs.compilation.listener
        knobs.runtime.jit_cache_hook = self._queue
        knobs.compilation.listener = self._record
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for all compilations. One that failed is left to the first launch, which compiles
        it again and raises its error."""
        knobs.runtime.jit_cache_hook = self._hook_before
        self._threads.shutdown(cancel_futures=kind is not None)
        knobs.compilation.listener = self._listener_before
        for (name, _), future in self._kernels.items():
            if not future.cancelled() and (failure := future.exception()) is not None:
                logger.warning(
                    "kernel not compiled ahead", extra={"kernel": name, "reason": str(failure)}
                )

    def _record(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's `listener`, in the thread that compiles."""
        if not cache_hit:
            self._compiled.append(src.name)

    def _queue(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton's `jit_cache_hook`; true: neither compile nor launch."""
        function = fn.jit_function
        kernel = (f"{function.__module__}.{fn.name}", key)
        if kernel not in self._kernels:
            # Hashed here: it walks over functions that other kernels share.
            _ = function.cache_key
            self._kernels[kernel] = self._threads.submit(self._compile, function, compile)
        return True


def _compile_to_cache(function: Any, request: dict[str, Any]) -> None:
    """Compile what a launch asked for, as the launch itself would, and its launcher."""
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(request["specialization_data"])["options"].items()
    }
    source = ASTSource(function, request["signature"], request["constants"], request["configs"][0])
    # The same for all devices of a process; the threads of the pool have none of their own.
    target = driver.active.get_current_target()
    kernel = triton.compile(source, target=target, options=options)
    driver.active.launcher_cls(kernel.src, kernel.metadata)
