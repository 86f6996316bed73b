"""Every example of docs/sdk.md is run, as it stands but for the address."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.integration.stack import Stack

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
EXAMPLES = dict(
    re.findall(r"^### (.*?)\n(?:(?!^###).)*?```python\n(.*?)```", PAGE.read_text(), re.S | re.M)
)
SILENT = {"5.", "6.", "9.", "18.", "21."}
"""Examples that print nothing."""


class TlsFront:
    """Takes TLS connections to plain ones; good for one router."""

    def __init__(self, to: str, directory: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / "ca.pem")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.set_alpn_protocols(["h2"])
        authority.issue_cert("localhost").configure_cert(self._context)
        self._to = to.rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                there = socket.create_connection((self._to[0], int(self._to[1])))
                here = self._context.wrap_socket(raw, server_side=True)
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def addresses(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    monkeypatch.chdir(tmp_path)
    front = TlsFront(stack.router.address, tmp_path)
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
