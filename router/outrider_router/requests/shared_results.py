"""Results that concurrent callers share: one computation for equal keys."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
SharedT = TypeVar("SharedT")
MAX_KEPT: Final = 4
"""Number of results that are kept."""


class SharedResults(Generic[KeyT, SharedT]):
    """The newest results by key. The choices of one request are validated concurrently, and their
    prompt and grammar are the same: without this, 128 choices would take 128 times as long."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[KeyT, asyncio.Task[SharedT]] = OrderedDict()

    async def get_result(self, key: KeyT, compute: Callable[[], Awaitable[SharedT]]) -> SharedT:
        """Return the result for a key, computed by the first caller. Raises the computation's
        error, which is not kept. A caller that is cancelled does not cancel the computation."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.ensure_future(_call(compute))
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._forget_failure(key, done))
            if len(self._tasks) > MAX_KEPT:
                self._tasks.popitem(last=False)
        return await asyncio.shield(task)

    def _forget_failure(self, key: KeyT, task: asyncio.Task[SharedT]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed and self._tasks.get(key) is task:
            del self._tasks[key]


async def _call(compute: Callable[[], Awaitable[SharedT]]) -> SharedT:
    return await compute()
