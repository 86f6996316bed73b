"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.engine.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's checkpoint, which is written at its first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str) -> Path:
        path = root / family
        if not path.is_dir():
            write_checkpoint(family, path)
        return path

    return get
