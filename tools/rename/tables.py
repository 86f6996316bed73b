"""The tables of this folder, and how paths and dotted names of modules belong together."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLES: Final = Path("tools/rename")
ROOTS: Final = ("verifier/", "drafter/", "router/", "benchmarks/", "deploy/ray/", "")
"""Folders in which Python finds packages; the last one is the root of the repository."""
GENERATED: Final = "/v1/"
"""Part of the paths of generated protobuf code, which is never edited by hand."""


@dataclass(frozen=True)
class ModuleRow:
    """A row of modules.tsv. `mark`: "" moves alone; "merge" joins the module to others at the new
    path; "hook" is left to hand work; "data" is a file that is no module.
    """

    old: str
    new: str
    mark: str
    purpose: str


@dataclass(frozen=True)
class SymbolRow:
    """A row of symbols.tsv: the symbol `old` of a module (its old path) gets the name `new`.

    Of a member, `old` is Class.member; of a parameter, function.parameter or
    Class.method.parameter. `new` is the last part of the name alone.
    """

    kind: str
    module: str
    old: str
    new: str
    word: str


@dataclass(frozen=True)
class WordRow:
    """A row of words.tsv: `old` is a regular expression over prose, `new` what replaces it."""

    old: str
    new: str
    where: str


def read_modules(root: Path) -> list[ModuleRow]:
    """All rows of modules.tsv."""
    return [ModuleRow(*row) for row in _rows(root / TABLES / "modules.tsv", 4)]


def read_symbols(root: Path) -> list[SymbolRow]:
    """All rows of symbols.tsv."""
    return [SymbolRow(*row) for row in _rows(root / TABLES / "symbols.tsv", 5)]


def read_words(root: Path) -> list[WordRow]:
    """All rows of words.tsv."""
    return [WordRow(*row) for row in _rows(root / TABLES / "words.tsv", 3)]


def read_packages(root: Path) -> dict[str, str]:
    """The paragraph of each package's `__init__.py`, by folder."""
    return {row[0]: row[1] for row in _rows(root / TABLES / "packages.tsv", 2)}


def _rows(path: Path, columns: int) -> list[list[str]]:
    with path.open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    for number, row in enumerate(rows, 2):
        if len(row) != columns:
            raise ValueError(f"{path}:{number}: {len(row)} columns, expected {columns}")
    return rows


def tracked(root: Path, *patterns: str) -> list[str]:
    """Tracked files that exist, as paths relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted({name for name in found.split("\n") if name and (root / name).is_file()})


def dotted(path: str) -> str:
    """The name by which a module is imported."""
    base = next(base for base in ROOTS if path.startswith(base))
    return path.removeprefix(base).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def current_path(root: Path, modules: Iterable[ModuleRow]) -> dict[str, str]:
    """Where each module of the table is now: at its old path, or at its new one."""
    return {row.old: row.old if (root / row.old).is_file() else row.new for row in modules}
