"""Packages that are not installed, for a program that another Python runs."""

from __future__ import annotations

from collections.abc import Iterable

_CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def without(packages: Iterable[str]) -> str:
    """What such a program begins with."""
    return _CODE.format(packages=set(packages))
