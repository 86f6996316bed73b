"""Coroutines that start immediately, run to their first wait, and continue in a task."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any


class EagerCoroutine:
    """A coroutine that has already run to its first wait. Awaiting it runs the rest. It must be
    awaited in a task, and only once.

    An exception of the coroutine is raised by the await, even if the first step raised it. A
    coroutine that is never awaited is closed when it is garbage-collected. The first step runs in
    the creator's task or callback, so the coroutine must not use its current task (as
    `asyncio.timeout` does) before its first wait. Eager task factories do the same from Python 3.12
    on.
    """

    __slots__ = ("_coroutine", "_error", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._error: BaseException | None = None
        self._waits_for: Any = None
        try:
            self._waits_for = coroutine.send(None)
        except BaseException as error:
            self._error = error

    def __await__(self) -> Generator[Any, Any, None]:
        if isinstance(self._error, StopIteration):
            return
        if self._error is not None:
            raise self._error
        waits_for = self._waits_for
        while True:
            try:
                try:
                    yield waits_for
                except GeneratorExit:
                    self._coroutine.close()
                    raise
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(None)
            except StopIteration:
                return
