"""Every example of docs/sdk.md is run, as it stands but for the address."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.integration.stack import Stack, StackOptions

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
EXAMPLES = dict(
    re.findall(r"^### (.*?)\n(?:(?!^###).)*?```python\n(.*?)```", PAGE.read_text(), re.S | re.M)
)
SILENT = {"5.", "6.", "9.", "19.", "22."}
"""Examples that print nothing."""


class TlsFront:
    """Takes TLS connections to plain ones, in a thread of its own."""

    def __init__(self, to: str, directory: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(directory / "ca.pem"))
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.set_alpn_protocols(["h2"])
        authority.issue_cert("localhost").configure_cert(self._context)
        self._host, _, self._port = to.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self.address = f"localhost:{starting.result(30)}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        finally:
            back.close()
            writer.close()


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.fixture(scope="module")
def stack_options(tmp_path_factory: pytest.TempPathFactory) -> StackOptions:
    """The template of the tiny model knows no tools."""
    file = tmp_path_factory.mktemp("router") / "router.toml"
    file.write_text('tool_call_parser = "hermes"\n')
    return {"router": ["--config", str(file)]}


@pytest.fixture(scope="module")
def addresses(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the page says, and what stands for it here."""
    directory = tmp_path_factory.mktemp("page")
    front = TlsFront(stack.router.address, directory)
    with contextlib.chdir(directory):
        yield {"127.0.0.1:50050": stack.router.address, "localhost:50443": front.address}
    front.close()


def test_the_page_has_at_least_twenty_examples() -> None:
    assert len(EXAMPLES) >= 20
    assert PAGE.read_text().count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, addresses: dict[str, str]) -> None:
    code = EXAMPLES[name]
    assert any(address in code for address in addresses)
    for written, real in addresses.items():
        code = code.replace(written, real)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"{PAGE.name}: {name}", "exec"), {"__name__": "__main__"})
    assert bool(said.getvalue().strip()) == (name.split()[0] not in SILENT)
