"""Sends many completions over HTTP at once, each by a connection of its own, and prints how many
answers of each status came: `python -m tests.fakes.burst HOST:PORT COUNT`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter


async def ask(host: str, port: str, body: bytes) -> str:
    """The status of one answer, or the error that it ended with."""
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: burst\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        return answer.split(b" ", 2)[1].decode() if answer else "closed"
    except OSError as error:
        return repr(error)


async def main(address: str, count: int) -> None:
    host, _, port = address.rpartition(":")
    body = json.dumps({"prompt": "hello there", "max_tokens": 4}).encode()
    statuses = await asyncio.gather(*(ask(host, port, body) for _ in range(count)))
    print(json.dumps(Counter(statuses)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
