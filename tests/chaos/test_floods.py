"""Floods of connections, chunks and large bodies: streams and /health go on as if calm."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.client.local.certificates import make_certificates
from tests.chaos import silent_connections
from tests.integration.few_files_router import MAX_FILES
from tests.integration.gap_meter import GapMeter, Gaps, measure_calm
from tests.integration.stack import Stack

ATTACK_S = 3.0
BODY_BYTES = 8_000_000
VALUES = 500_000
"""In bodies that are parsed."""


@dataclass
class Target:
    """A fleet under attack, all of whose ports have certificates."""

    stack: Stack
    ca: Path
    calm: Gaps

    @property
    def https(self) -> tuple[str, int]:
        host, _, port = str(self.stack.router.ready["http"]).rpartition(":")
        return host, int(port)

    def meter(self) -> GapMeter:
        return GapMeter(self.stack.router.address, self.stack.router.ready["http"], ca=self.ca)

    def post(self, path: str, head: str, body: bytes) -> int:
        """Status of a POST; the connection may be closed while the body is still being sent."""
        context = ssl.create_default_context(cafile=self.ca)
        with (
            socket.create_connection(self.https, timeout=60.0) as plain,
            context.wrap_socket(plain, server_hostname=self.https[0]) as connection,
        ):
            with suppress(OSError):
                connection.sendall(
                    f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    f"connection: close\r\n{head}\r\n\r\n".encode()
                    + body
                )
            with closing(connection.makefile("rb")) as answer:
                return int(answer.readline().split()[1])

    def post_all(self, bodies: list[bytes]) -> list[int]:
        """Statuses of completions that are sent at once."""

        def post(body: bytes) -> int:
            return self.post("/v1/completions", f"content-length: {len(body)}", body)

        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(post, bodies))


@pytest.fixture(scope="module")
def target(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("flooded")
    make_certificates(directory / "tls")
    with Stack(
        directory,
        model=str(tiny_target),
        head=str(tiny_head),
        router=["--http", "127.0.0.1:0"],
        with_drafter=False,
        tls=directory / "tls",
        router_module="tests.integration.few_files_router",
    ) as stack:
        ca = directory / "tls" / "ca.pem"
        calm = measure_calm(
            stack.router.address, str(stack.router.ready["http"]), seconds=2.0, ca=ca
        )
        assert calm.tokens > 10 and not calm.errors
        yield Target(stack, ca, calm)


def test_silent_connections_take_no_descriptors_from_others(target: Target) -> None:
    ports = [str(target.stack.router.ready["http"]), target.stack.router.address]
    asked = [str(MAX_FILES + 200), str(ATTACK_S), *ports]
    with target.meter() as meter:
        time.sleep(0.5)
        subprocess.run([sys.executable, silent_connections.__file__, *asked], check=True)
    meter.gaps.assert_close_to(target.calm)
    files = len(list(Path(f"/proc/{target.stack.router.pid}/fd").iterdir()))
    assert files < MAX_FILES


def test_bodies_in_tiny_chunks_are_refused(target: Target) -> None:
    chunks = b"1\r\na\r\n" * 100_000
    with target.meter() as meter, ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(target.post, "/v1/completions", "transfer-encoding: chunked", chunks)
            for _ in range(4)
        ]
        statuses = [each.result() for each in asked]
    assert statuses == [400] * 4
    meter.gaps.assert_close_to(target.calm)


def test_large_json_is_parsed_in_bounded_steps(target: Target) -> None:
    def body(values: str) -> bytes:
        return b'{"prompt": "a", "max_tokens": 1, "user": [' + values.encode() + b"]}"

    parsed = body(",".join(["{}"] * (VALUES // 2)))
    refused = body(",".join(["1"] * (BODY_BYTES // 2)))
    with target.meter() as meter:
        statuses = target.post_all([parsed, refused, parsed, refused, parsed, parsed])
    assert statuses == [200, 400, 200, 400, 200, 200]
    meter.gaps.assert_close_to(target.calm)


def test_prompts_of_megabytes_are_refused_before_they_are_tokenized(target: Target) -> None:
    texts = ["the quick brown fox [1, 2] " * (BODY_BYTES // 27), "a" * BODY_BYTES]
    bodies = [json.dumps({"prompt": text, "max_tokens": 1}).encode() for text in texts]
    begun = time.monotonic()
    with target.meter() as meter:
        statuses = target.post_all(bodies * 2)
    assert statuses == [400] * 4
    assert time.monotonic() - begun < 20.0
    meter.gaps.assert_close_to(target.calm)
