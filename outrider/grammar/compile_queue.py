"""Grammars that requests wait for: compiled on threads, shared by all that wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from outrider.errors import CancelledRequestError, OutriderError, ResourceExhaustedError
from outrider.grammar.compiler import Cancellation
from outrider.spec.structured import StructuredOutput

ResultT = TypeVar("ResultT")

MAX_WAITING: Final = 64
"""Grammars that may wait or be compiled, however many requests wait for each."""
RETRY_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Compiling(Generic[ResultT]):
    """A grammar that is being compiled, or waits for its turn."""

    done: asyncio.Future[ResultT]
    cancellation: Cancellation
    waiting: int = 0
    """Requests that wait for it."""


class CompileQueue(Generic[ResultT]):
    """Calls `compile_grammar` on threads, once for each grammar; asyncio thread only."""

    def __init__(
        self, compile_grammar: Callable[[StructuredOutput, Cancellation], ResultT], *, threads: int
    ) -> None:
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammars")
        self._compiling: dict[StructuredOutput, _Compiling[ResultT]] = {}

    async def compile(self, structured: StructuredOutput) -> ResultT:
        """The result for a grammar. Its compiling is cancelled once all its callers are.

        Raises what `compile_grammar` raises, and ResourceExhaustedError while too many wait.
        """
        compiling = self._compiling.get(structured) or self._begin(structured)
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
                compiling.cancellation.cancel()
                compiling.done.cancel()

    def _begin(self, structured: StructuredOutput) -> _Compiling[ResultT]:
        if len(self._compiling) >= MAX_WAITING:
            raise ResourceExhaustedError(
                f"{MAX_WAITING} structured outputs are being compiled",
                reason="COMPILING_EXHAUSTED",
                retry_after_s=RETRY_S,
            )
        loop = asyncio.get_running_loop()
        cancellation = Cancellation()
        done = loop.run_in_executor(self._threads, self._call, structured, cancellation)
        begun = self._compiling[structured] = _Compiling(done, cancellation)
        return begun

    def _call(self, structured: StructuredOutput, cancellation: Cancellation) -> ResultT:
        """On a thread."""
        if cancellation.is_cancelled:
            raise CancelledRequestError("nobody waits for this grammar any more")
        return self._compile(structured, cancellation)
