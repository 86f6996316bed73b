"""Lists where tests reach into private attributes of the serving packages.

    python -m tools.private_access [FOLDER ...]

It prints one line for each access, then the number of accesses of each file, and their sum. Without
arguments it reads `tests`. An access is counted if a serving package defines the name, which has
one leading underscore, and the test

* imports it,
* reads or writes it as an attribute of anything but `self` and `cls`,
* reads or writes it on `self` or `cls`, and the file defines no such name: it is inherited,
* or gives it as text to `getattr`, `setattr`, `delattr`, `hasattr`, pytest's `monkeypatch` or the
  `patch` of `unittest.mock`.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "outrider",
    "drafter/outrider_drafter",
    "verifier/outrider_verifier",
    "router/outrider_router",
)
BY_NAME = frozenset({"getattr", "setattr", "delattr", "hasattr", "patch", "object"})
"""Functions and methods that take the name of an attribute; the last one is `patch.object`."""
PUBLIC = frozenset({"_asdict", "_fields", "_field_defaults", "_make", "_replace"})
"""Documented methods of named tuples, whose underscore only keeps them apart from fields."""


class Access(NamedTuple):
    """A place where a file uses a private name of the packages."""

    line: int
    name: str


def is_private(name: str) -> bool:
    """Whether a name is private by its leading underscore."""
    return name.startswith("_") and not name.startswith("__") and name not in {"_", *PUBLIC}


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Private functions, classes, modules' and classes' variables, and attributes of objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found = name
            case ast.ClassDef(name=name):
                found = name
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found = name
            case ast.Name(id=name, ctx=ast.Store()):
                found = name
            case _:
                continue
        if is_private(found):
            yield found


def accessed_names(tree: ast.Module) -> Iterator[Access]:
    """Private names that a file uses and that are not its own attributes of `self` or `cls`."""
    own = set(defined_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")) if name in own:
                continue
            case ast.Attribute(attr=name):
                found = [name]
            case ast.ImportFrom(names=aliases):
                found = [alias.name for alias in aliases]
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function), args=arguments
            ) if function in BY_NAME:
                # A path as text names the attribute last: "package.module._name".
                found = [
                    argument.value.rpartition(".")[2]
                    for argument in arguments[:2]
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                ]
            case _:
                continue
        yield from (Access(node.lineno, name) for name in found if is_private(name))


def private_names(packages: Sequence[str] = PACKAGES, root: Path = ROOT) -> frozenset[str]:
    """Every private name that the packages define."""
    return frozenset(
        name
        for package in packages
        for path in (root / package).rglob("*.py")
        for name in defined_names(ast.parse(path.read_text(encoding="utf-8")))
    )


def accesses(source: str, private: frozenset[str]) -> list[Access]:
    """Where a test file uses private names of the packages, by line."""
    return sorted(each for each in accessed_names(ast.parse(source)) if each.name in private)


def accesses_by_file(folders: Sequence[str], root: Path = ROOT) -> dict[str, list[Access]]:
    """The accesses of each test file that has any, by its path from the root."""
    private = private_names(root=root)
    found = {
        path.relative_to(root).as_posix(): accesses(path.read_text(encoding="utf-8"), private)
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    }
    return {path: rows for path, rows in found.items() if rows}


def main() -> None:
    """Print the list, the number of each file and the sum."""
    found = accesses_by_file(sys.argv[1:] or ["tests"])
    for path, rows in found.items():
        for line, name in rows:
            print(f"{path}:{line}: {name}")
    counts = Counter({path: len(rows) for path, rows in found.items()})
    for path, count in counts.most_common():
        print(f"{count:6d} {path}")
    print(f"{counts.total():6d} in all")


if __name__ == "__main__":
    main()
