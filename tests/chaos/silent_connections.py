"""Holds silent connections open, in a process of its own: `COUNT SECONDS HOST:PORT...`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing, suppress

REOPEN_S = 0.5


async def hold(address: str) -> None:
    """Hold one open for ever, and open another one when it is closed."""
    host, _, port = address.rpartition(":")
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            with closing(writer):
                await reader.read()
        await asyncio.sleep(REOPEN_S)


async def hold_all(count: int, seconds: float, addresses: list[str]) -> None:
    """Hold `count` of them open to each address."""
    holding = [asyncio.create_task(hold(each)) for each in addresses for _ in range(count)]
    await asyncio.wait(holding, timeout=seconds)
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(hold_all(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
