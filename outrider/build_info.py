"""Detection of packages compiled by mypyc, and refusal to mix them with others (decision 48)."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

_SPEC: Final = Path(__file__).parent / "spec"


def is_extension(file: str) -> bool:
    """Return whether the file of a module is a compiled extension."""
    return file.endswith(tuple(EXTENSION_SUFFIXES))


def has_extensions(folder: Path) -> bool:
    """Return whether a folder or one of its subfolders contains compiled modules."""
    return any(is_extension(entry.name) for entry in folder.rglob("*"))


COMPILED: Final = has_extensions(_SPEC)
"""Whether this installation of `outrider` is compiled by mypyc."""


def require_one_build(package: str) -> None:
    """Raise ImportError if a package is compiled and `outrider` is not, or the other way round.

    `package` is the `__file__` of the package. The builds must agree, because compiled modules
    depend on each other's object layouts.
    """
    if has_extensions(Path(package).parent) != COMPILED:
        raise ImportError(
            f"{Path(package).parent} and {_SPEC.parent} are of different builds, one is compiled: "
            "a checkout comes before an installation, or the other way round"
        )
