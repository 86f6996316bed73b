"""Leak check: tasks, threads and files that a run did not release."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass

_SHARED = ("asyncio_", "uvloop_", "MainThread")
"""Prefixes of the names of threads that live as long as the process."""
_GRPC_POLLER = "_poll_wrapper"


@dataclass(frozen=True, slots=True)
class ProcessResources:
    """Tasks, threads and open files of this process, each counted by name."""

    tasks: Counter[str]
    threads: Counter[str]
    files: Counter[str]

    @classmethod
    def now(cls) -> ProcessResources:
        """Return the current resources. Call this on the event loop."""
        return cls(
            tasks=Counter(_name_of(task) for task in asyncio.all_tasks() if not task.done()),
            threads=Counter(
                thread.name
                for thread in threading.enumerate()
                if not thread.name.startswith(_SHARED) and _GRPC_POLLER not in thread.name
            ),
            files=_files(),
        )

    def beyond(self, before: ProcessResources) -> list[str]:
        """Return descriptions of the resources that are not in `before`."""
        more = (
            ("task", self.tasks - before.tasks),
            ("thread", self.threads - before.threads),
            ("file", self.files - before.files),
        )
        return [f"{count} {kind} {name}" for kind, new in more for name, count in new.items()]


async def find_leaks(before: ProcessResources, *, timeout_s: float = 20.0) -> list[str]:
    """Wait until this process holds no more resources than in `before`. Return descriptions of
    those that it still holds in addition after `timeout_s`."""
    end = asyncio.get_running_loop().time() + timeout_s
    while found := ProcessResources.now().beyond(before):
        if asyncio.get_running_loop().time() > end:
            return found
        gc.collect()
        await asyncio.sleep(0.02)
    return []


def _name_of(task: asyncio.Task[object]) -> str:
    name = task.get_name()
    if not name.startswith("Task-"):
        return name
    return getattr(task.get_coro(), "__qualname__", name)


def _files() -> Counter[str]:
    """Return the open file descriptors, counted by their targets. Sockets count by kind, and so do
    pipes."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the listing's own
            continue
        if target != os.devnull:  # an event loop keeps one in reserve
            found[target.partition(":[")[0]] += 1
    return found
