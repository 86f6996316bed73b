"""The stack of the chaos tests: one for all faults of a module, repaired after each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.stack import Stack


@pytest.fixture(scope="module")
def survivor(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with Stack(
        tmp_path_factory.mktemp("stack"),
        model=str(tiny_target),
        head=str(tiny_head),
        router=["--metrics-port", "0", "--queue-limit", "16"],
        verifier=["--max-sessions", "8"],
    ) as running:
        yield running


@pytest.fixture
def stack(survivor: Stack) -> Stack:
    """What lives through every fault of its module must be as good as new after each."""
    survivor.repair()
    return survivor
