"""Client process of `outrider bench events`: streams answers one after another.

It prints {"event": "ready"}. Then, for each line on stdin, it prints its totals so far:
{"messages": N, "requests": N, "cpu_s": S, "at": T}, where T is the monotonic time in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from functools import partial

from outrider.client import AsyncClient, RetryPolicy
from outrider.process_tuning import run_event_loop


class Received:
    """Counts the messages and the finished requests of all streams of this process."""

    def __init__(self) -> None:
        self.messages = 0
        self.requests = 0

    async def follow(self, client: AsyncClient, max_tokens: int) -> None:
        """Stream one answer after another until the task is cancelled."""
        while True:
            async with client.stream("events", max_tokens=max_tokens, ignore_eos=True) as stream:
                async for _ in stream:
                    self.messages += 1
            self.requests += 1

    async def follow_http(self, address: str, max_tokens: int) -> None:
        """Stream one answer after another over HTTP until the task is cancelled. Events are counted
        without decoding them, to save processor time."""
        host, _, port = address.rpartition(":")
        body = {"prompt": "events", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        content = json.dumps({**body, "temperature": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + content)
            while data := await reader.read(1 << 16):
                self.messages += data.count(b"data: {")
            writer.close()
            self.requests += 1


async def serve(args: argparse.Namespace) -> None:
    """Stream answers until stdin ends; print a report for each line on stdin."""
    received = Received()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with contextlib.AsyncExitStack() as stack:
        if args.http:
            follow = partial(received.follow_http, args.http, args.max_tokens)
        else:
            client = AsyncClient(args.router, retry=RetryPolicy(max_attempts=5))
            await stack.enter_async_context(client)
            follow = partial(received.follow, client, args.max_tokens)
        tasks = [asyncio.create_task(follow()) for _ in range(args.sessions)]
        print(json.dumps({"event": "ready"}), flush=True)
        while await reader.readline():
            report = vars(received) | {"cpu_s": time.process_time(), "at": time.monotonic()}
            print(json.dumps(report), flush=True)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Run the client process."""
    parser = argparse.ArgumentParser()
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--router")
    target.add_argument("--http")
    parser.add_argument("--sessions", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    run_event_loop(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
