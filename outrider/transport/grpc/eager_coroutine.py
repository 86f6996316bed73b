"""Eagerly started coroutines: they run to their first wait at once, and to their end in a task."""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any


class EagerCoroutine:
    """A coroutine whose first step has run; awaiting it, once and in a task, does the rest.

    What the coroutine raises is raised by the await, also where the first step raised it. One
    that is never awaited is closed when it is dropped. The first step runs in its maker's task
    or callback, so a coroutine that asks for its task (as `asyncio.timeout` does) must not begin
    so. Task factories do the same from Python 3.12 on.
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
