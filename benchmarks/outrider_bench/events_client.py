"""A client process for `outrider bench events`: streams answers, one after the other, for a while.

Prints {"event": "ready"}; then, once a line comes in on stdin, what it has received so far:
{"tokens": N, "messages": N, "requests": N, "cpu_s": S, "at": monotonic seconds}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time

from outrider.client import AsyncClient, RetryPolicy
from outrider.process import run


class Received:
    """What the streams of this process have received."""

    def __init__(self) -> None:
        self.tokens = 0
        self.messages = 0
        self.requests = 0

    async def follow(self, client: AsyncClient, max_tokens: int) -> None:
        """Stream answers for ever."""
        while True:
            async with client.stream("events", max_tokens=max_tokens, ignore_eos=True) as stream:
                async for delta in stream:
                    self.tokens += len(delta.token_ids)
                    self.messages += 1
            self.requests += 1


async def serve(args: argparse.Namespace) -> None:
    """Stream until stdin ends; report whenever a line comes."""
    received = Received()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with AsyncClient(args.router, retry=RetryPolicy(max_attempts=5)) as client:
        tasks = [
            asyncio.create_task(received.follow(client, args.max_tokens))
            for _ in range(args.sessions)
        ]
        print(json.dumps({"event": "ready"}), flush=True)
        while await reader.readline():
            report = vars(received) | {"cpu_s": time.process_time(), "at": time.monotonic()}
            print(json.dumps(report), flush=True)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--router", required=True)
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
