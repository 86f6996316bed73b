"""Arguments of processes, read back."""

from __future__ import annotations

import itertools


def flags_of(arguments: list[str]) -> dict[str, str]:
    """--name value pairs."""
    pairs = itertools.pairwise(arguments)
    return {name[2:]: value for name, value in pairs if name.startswith("--")}
