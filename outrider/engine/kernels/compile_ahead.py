"""Parallel compilation of Triton kernels before their first launch."""

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
"""Maximum number of compiling threads. Triton holds the interpreter lock for about a sixth of the
time that it compiles, so more threads would wait for the lock."""


CompileKernel = Callable[[Any, dict[str, Any]], None]
"""Function that compiles a kernel. Arguments: the JIT function, and the description of the launch
that Triton passes to `jit_cache_hook` as `compile`."""


class KernelCompiler:
    """Context manager in which launching a kernel that is not compiled yet only queues its
    compilation.

    Background threads compile each queued kernel and its launcher into Triton's cache on disk. The
    first launch after the context loads it from there. A launch that only queues a kernel does not
    run it, so use the context only where nothing needs to run, such as during the capture of a CUDA
    graph that is discarded. The context applies to launches from all threads.
    """

    def __init__(self, compile_kernel: CompileKernel | None = None) -> None:
        """`compile_kernel`: function that compiles a kernel; by default, it is compiled into
        Triton's cache on disk."""
        self._compile = compile_kernel or _compile_to_cache
        self._threads = ThreadPoolExecutor(
            min(MAX_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="compile"
        )
        self._kernels: dict[tuple[str, str], Future[None]] = {}
        self._compiled: list[str] = []
        """Names of the kernels that were not in the cache, added by the compiling threads."""
        self._num_known = 0
        self._hook_before: Any = None
        self._listener_before: Any = None

    @property
    def num_kernels(self) -> int:
        """Number of kernels queued so far."""
        return len(self._kernels)

    def wait_cached(self) -> bool:
        """Wait for all kernels queued so far. Return whether all kernels that were queued since the
        last call were already in the cache on disk."""
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
        """Wait for all compilations. If a compilation failed, the first launch of the kernel
        compiles it again and raises the error."""
        knobs.runtime.jit_cache_hook = self._hook_before
        self._threads.shutdown(cancel_futures=kind is not None)
        knobs.compilation.listener = self._listener_before
        for (name, _), future in self._kernels.items():
            if not future.cancelled() and (failure := future.exception()) is not None:
                logger.warning(
                    "kernel not compiled ahead", extra={"kernel": name, "reason": str(failure)}
                )

    def _record(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Record a compiled kernel. Triton calls this as its `listener` in the compiling thread."""
        if not cache_hit:
            self._compiled.append(src.name)

    def _queue(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Queue a kernel. Triton calls this as its `jit_cache_hook`. The result True tells Triton
        neither to compile nor to launch the kernel."""
        function = fn.jit_function
        kernel = (f"{function.__module__}.{fn.name}", key)
        if kernel not in self._kernels:
            # Hashed here: it walks over functions that other kernels share.
            _ = function.cache_key
            self._kernels[kernel] = self._threads.submit(self._compile, function, compile)
        return True


def _compile_to_cache(function: Any, request: dict[str, Any]) -> None:
    """Compile a kernel and its launcher for a launch, as the launch itself would."""
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(request["specialization_data"])["options"].items()
    }
    source = ASTSource(function, request["signature"], request["constants"], request["configs"][0])
    # The same for all devices of a process; the threads of the pool have none of their own.
    target = driver.active.get_current_target()
    kernel = triton.compile(source, target=target, options=options)
    driver.active.launcher_cls(kernel.src, kernel.metadata)
