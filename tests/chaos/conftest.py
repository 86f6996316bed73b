"""Every chaos test gets a stack of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stack import Stack


@pytest.fixture
def stack(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> Iterator[Stack]:
    with Stack(
        tmp_path,
        model=str(tiny_target),
        head=str(tiny_head),
        router=["--metrics-port", "0", "--queue-limit", "16"],
        verifier=["--max-sessions", "8"],
    ) as running:
        yield running
