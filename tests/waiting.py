"""Waiting for what must come, for as long as a machine may stall: what comes costs no time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

PATIENCE_S = 20.0
T = TypeVar("T")


async def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait until `condition()` is true, whoever brings that about."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not become true in time"
        await asyncio.sleep(0.002)


def wait_until(
    condition: Callable[[], Any], *, timeout_s: float = 30.0, what: str = "condition"
) -> None:
    """Poll a zero-argument callable until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {timeout_s} s")
        time.sleep(0.02)


async def soon(awaited: Awaitable[T]) -> T:
    """What is awaited, which must end. Raises TimeoutError where it hangs."""
    return await asyncio.wait_for(awaited, PATIENCE_S)
