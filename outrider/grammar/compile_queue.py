"""Compile queue: compiles each grammar on a thread, and only once if several requests wait for
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from outrider.errors import CancelledRequestError, OutriderError, ResourceExhaustedError
from outrider.grammar.compile_scheduler import CompileScheduler, CompileTask
from outrider.grammar.compiler import Cancellation, FirstTryEndedError
from outrider.spec.structured_output import StructuredOutput

ResultT = TypeVar("ResultT")
CompileCall: TypeAlias = Callable[[StructuredOutput, Cancellation], ResultT]
"""Function that compiles a grammar on the calling thread and returns the result. The `Cancellation`
can end the call early."""

MAX_WAITING: Final = 64
"""Maximum number of grammars that wait or are being compiled in a `CompileQueue`. A grammar counts
once, even if several requests wait for it."""
RETRY_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Compiling(Generic[ResultT]):
    """A grammar that is being compiled or waits to be compiled."""

    structured: StructuredOutput
    done: asyncio.Future[ResultT]
    cancellation: Cancellation
    waiting: int = 0
    """Number of requests that wait for this grammar."""


class CompileQueue(Generic[ResultT]):
    """Calls a compile function on threads, once for each grammar, however many requests wait for
    it.

    Not thread-safe: use it from the asyncio thread only.
    """

    def __init__(self, compile_grammar: CompileCall[ResultT], *, threads: int) -> None:
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammars")
        self._compiling: dict[StructuredOutput, _Compiling[ResultT]] = {}

    async def compile(self, structured: StructuredOutput, *, tenant: str = "") -> ResultT:
        """Compile a grammar and return the result of the compile function.

        The compilation is cancelled once all callers that wait for it are cancelled. `tenant` is
        the tenant of the request; only `TwoStageCompileQueue` uses it. Raises the errors of the
        compile function, and ResourceExhaustedError if too many grammars wait.
        """
        compiling = self._compiling.get(structured) or self._begin(structured, tenant)
        compiling.waiting += 1
        try:
            # Whoever leaves does not take it from the others.
            return await asyncio.shield(compiling.done)
        except OutriderError as error:
            raise error.copy() from None
        finally:
            compiling.waiting -= 1
            if not compiling.waiting:
                if self._compiling.get(structured) is compiling:
                    del self._compiling[structured]
                self._abandon(compiling)

    def _begin(self, structured: StructuredOutput, tenant: str) -> _Compiling[ResultT]:
        if len(self._compiling) >= MAX_WAITING:
            raise _exhausted(f"{MAX_WAITING} structured outputs are being compiled")
        loop = asyncio.get_running_loop()
        cancellation = Cancellation()
        done = loop.run_in_executor(self._threads, _call, self._compile, structured, cancellation)
        begun = self._compiling[structured] = _Compiling(structured, done, cancellation)
        return begun

    def _abandon(self, compiling: _Compiling[ResultT]) -> None:
        """End a compilation that no request waits for."""
        compiling.cancellation.cancel()
        compiling.done.cancel()


class TwoStageCompileQueue(CompileQueue[ResultT]):
    """Compile queue for grammars of clients that do not trust each other.

    Each grammar first gets a try with a short time limit. A grammar that needs longer is compiled
    again with the full limits, from a second queue. Compilations from the second queue never occupy
    all threads, unless there is only one thread.
    """

    def __init__(
        self,
        first_try: CompileCall[ResultT],
        compile_grammar: CompileCall[ResultT],
        *,
        threads: int,
    ) -> None:
        """Create a queue.

        `first_try` compiles a grammar within a short time limit, and raises FirstTryEndedError if
        that is not possible. The grammar is then compiled by `compile_grammar`, with the full
        limits. `threads` is the number of worker threads.
        """
        super().__init__(compile_grammar, threads=threads)
        self._first_try = first_try
        self._scheduler = CompileScheduler[_Compiling[ResultT]](threads)

    def _begin(self, structured: StructuredOutput, tenant: str) -> _Compiling[ResultT]:
        done = asyncio.get_running_loop().create_future()
        begun = self._compiling[structured] = _Compiling(structured, done, Cancellation())
        displaced = self._scheduler.add_first_try(begun, tenant)
        if displaced is not None:
            displaced.done.set_exception(_exhausted("too many structured outputs wait"))
        self._start()
        return begun

    def _abandon(self, compiling: _Compiling[ResultT]) -> None:
        super()._abandon(compiling)
        self._scheduler.discard(compiling)

    def _start(self) -> None:
        """Start the next compilations on the free threads."""
        loop = asyncio.get_running_loop()
        while (turn := self._scheduler.take()) is not None:
            compiling = turn.item
            call = self._compile if turn.is_slow else self._first_try
            future = loop.run_in_executor(
                self._threads, _call, call, compiling.structured, compiling.cancellation
            )
            future.add_done_callback(partial(self._finish, turn))

    def _finish(
        self, turn: CompileTask[_Compiling[ResultT]], ended: asyncio.Future[ResultT]
    ) -> None:
        """Deliver the result or error of a call on a thread, and start the next compilations."""
        self._scheduler.finish(turn)
        compiling, done = turn.item, turn.item.done
        if ended.cancelled():
            done.cancel()
            return
        error = ended.exception()
        if done.done():
            pass  # Nobody waits for it any more.
        elif error is None:
            done.set_result(ended.result())
        elif not isinstance(error, FirstTryEndedError):
            done.set_exception(error)
        elif not self._scheduler.add_full_compile(compiling):
            done.set_exception(
                _exhausted("too many structured outputs wait that take long to compile")
            )
        self._start()


def _call(
    compile_grammar: CompileCall[ResultT], structured: StructuredOutput, cancellation: Cancellation
) -> ResultT:
    """Compile a grammar on a worker thread."""
    if cancellation.is_cancelled:
        raise CancelledRequestError("nobody waits for this grammar any more")
    return compile_grammar(structured, cancellation)


def _exhausted(why: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(why, reason="COMPILING_EXHAUSTED", retry_after_s=RETRY_S)
