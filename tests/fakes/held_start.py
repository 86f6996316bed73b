"""A hook that holds the start of a process until a file exists, as large models do for minutes."""

from __future__ import annotations

import time
from pathlib import Path


def install(hooks: object, *, until: str) -> None:
    """Wait for the file `until`; the process ends first if its test has ended."""
    while not Path(until).exists():
        time.sleep(0.02)
