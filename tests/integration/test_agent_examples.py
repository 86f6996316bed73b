"""The agents among the examples, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.test_serve import serving
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "What is the temperature in Lisbon?"


class Addresses(NamedTuple):
    """Of a server's APIs, as the examples take them."""

    agent_http: str
    agent_sdk: str


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def addresses(request: pytest.FixtureRequest, tiny_target: Path) -> Iterator[Addresses]:
    """A model with random weights, which calls nonsense, and a small one that was trained."""
    model = str(tiny_target) if request.param == "tiny" else "smollm2-135m"
    flags = ("--model", model, "--drafter-methods", "ngram", "--threads", "1")
    # The templates of both models know no tools.
    parser = ("--tool-call-parser", "hermes")
    said: list[str] = []

    def http_address() -> str | None:
        found = re.search(r"http://[\d.:]+/v1", "".join(said))
        return found and found.group()

    with serving(*flags, *parser, "--port", "0", "--http", "127.0.0.1:0", said=said) as service:
        wait_until(lambda: http_address() is not None, timeout_s=20.0, what="the HTTP address")
        yield Addresses(str(http_address()), service.address)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", Addresses._fields)
def test_an_agent_calls_its_tools_and_comes_to_an_end(addresses: Addresses, name: str) -> None:
    done = subprocess.run(
        [sys.executable, f"{EXAMPLES}/{name}.py", getattr(addresses, name), QUESTION],
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
        capture_output=True,
        text=True,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stderr
    calls = re.findall(r"^call: (.*?)\(.*?\) -> (.*)", done.stdout, re.M | re.S)
    assert calls, done.stdout
    assert calls[0][0] in ("look_up_temperature", "calculate")
