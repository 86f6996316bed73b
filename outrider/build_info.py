"""Detects compiled (mypyc) builds and refuses packages of different builds (decision 48)."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

_SPEC: Final = Path(__file__).parent / "spec"


def is_extension(file: str) -> bool:
    """Return whether a module in this file is compiled."""
    return file.endswith(tuple(EXTENSION_SUFFIXES))


def has_extensions(folder: Path) -> bool:
    """Return whether a folder, or a folder within it, holds compiled modules."""
    return any(is_extension(entry.name) for entry in folder.rglob("*"))


COMPILED: Final = has_extensions(_SPEC)
"""Whether this installation is compiled."""


def require_one_build(package: str) -> None:
    """Raise ImportError if the package with this `__file__` is from another build than this
    package. Compiled modules depend on each other's object layouts."""
    if has_extensions(Path(package).parent) != COMPILED:
        raise ImportError(
            f"{Path(package).parent} and {_SPEC.parent} are of different builds, one is compiled: "
            "a checkout comes before an installation, or the other way round"
        )
