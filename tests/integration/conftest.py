"""Running stacks for the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client, RetryPolicy
from tests.integration.stack import Stack


@pytest.fixture(scope="module")
def stack(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("stack")
    arguments = ["--metrics-port", "0"]
    with Stack(directory, model=str(tiny_target), head=str(tiny_head), router=arguments) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    retry = RetryPolicy(max_attempts=1)
    with Client(stack.router.address, timeout_s=60.0, retry=retry) as connected:
        yield connected
