"""Looks for clashes in the tables: a name for two things, crowded folders, circles of packages."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from tools.rename.tables import (
    ModuleRow,
    SymbolRow,
    dotted,
    read_modules,
    read_packages,
    read_symbols,
    tracked,
)
from tools.rename.wheel import compiled_modules

RowT = TypeVar("RowT")
MOST_MODULES: Final = 22
"""Modules of a folder."""
OPEN: Final = ("outrider/wire", "outrider/engine")
"""Folders that may be larger."""


def check_tables(root: Path) -> list[str]:
    """Everything that is wrong with the tables."""
    modules = read_modules(root)
    symbols = read_symbols(root)
    return [
        *_check_modules(root, modules),
        *_check_folders(root, modules),
        *_check_packages(root, modules),
        *_check_symbols(root, modules, symbols),
        *_check_classes(root, modules, symbols),
    ]


def _check_modules(root: Path, modules: list[ModuleRow]) -> list[str]:
    notes = [f"{row.old}: listed twice" for row in _twice(modules, lambda r: r.old)]
    alone = [row for row in modules if row.mark != "merge"]
    notes += [f"{row.new}: two modules, none a merge" for row in _twice(alone, lambda r: r.new)]
    targets = {row.new for row in alone}
    merged = [row for row in modules if row.mark == "merge"]
    notes += [f"{row.new}: only merges" for row in merged if row.new not in targets]
    notes += [f"{row.old}: no purpose" for row in modules if not row.purpose.strip()]
    listed = {row.old for row in modules} | {row.new for row in modules}
    scope = re.compile(
        r"(outrider|(verifier|drafter|router)/outrider_\w+|benchmarks/outrider_\w+|deploy/ray/\w+)/"
    )
    for path in tracked(root, "*.py"):
        left = path in listed or path.endswith("__init__.py") or "/v1/" in path
        if scope.match(path) and not left:
            notes.append(f"{path}: not in modules.tsv")
    if all((root / row.old).is_file() for row in modules):
        compiled = compiled_modules(root)
        for target in {row.new for row in modules if row.mark == "merge"}:
            parts = [row.old for row in modules if row.new == target]
            if len({part in compiled for part in parts}) > 1:
                notes.append(f"{target}: compiled and other modules are merged: {parts}")
    return notes


def _twice(rows: Sequence[RowT], key: Callable[[RowT], object]) -> list[RowT]:
    counts = Counter(key(row) for row in rows)
    return [row for row in rows if counts[key(row)] > 1]


def _check_folders(root: Path, modules: list[ModuleRow]) -> list[str]:
    names = {row.new for row in modules if row.new.endswith(".py")}
    folders = Counter(str(PurePosixPath(n).parent) for n in names if "__init__" not in n)
    notes = [
        f"{folder}: {count} modules"
        for folder, count in folders.items()
        if count > MOST_MODULES and folder not in OPEN
    ]
    described = set(read_packages(root))
    old = {str(PurePosixPath(row.old).parent) for row in modules}
    old |= {str(PurePosixPath(row.new).parent) for row in modules if "__init__" in row.old}
    notes += [
        f"{folder}: no paragraph in packages.tsv"
        for folder in folders
        if folder not in old and folder not in described and "hooks" not in folder
    ]
    return notes


def _check_packages(root: Path, modules: list[ModuleRow]) -> list[str]:
    """Circles between the new packages of a process."""
    new = {dotted(row.old): row.new for row in modules if row.old.endswith(".py")}
    here = {dotted(row.new): row.new for row in modules if row.new.endswith(".py")}
    arrows: defaultdict[str, set[str]] = defaultdict(set)
    why: dict[tuple[str, str], str] = {}
    for row in modules:
        path = next((p for p in (row.old, row.new) if (root / p).is_file()), None)
        if path is None or not path.endswith(".py") or row.mark == "hook":
            continue
        source = _package(row.new)
        for name in _imports((root / path).read_text()):
            target = new.get(name) if path == row.old else here.get(name)
            found = _package(target) if target else ""
            if found and found != source and found.split("/")[:-1] == source.split("/")[:-1]:
                arrows[source].add(found)
                why.setdefault((source, found), f"{row.new} -> {target}")
    notes = []
    for source, targets in sorted(arrows.items()):
        for target in sorted(targets):
            if source < target and source in arrows[target]:
                pair = f"{why[source, target]}; {why[target, source]}"
                notes.append(f"circle of packages {source} and {target}: {pair}")
    return notes


def _package(path: str) -> str:
    """The folder below a process's package that a module is in; "" right in the package."""
    parts = path.split("/")
    base = next((i for i, part in enumerate(parts) if part.startswith("outrider")), 0)
    return "/".join(parts[: base + 2]) if len(parts) > base + 2 else ""


def _imports(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def _check_symbols(root: Path, modules: list[ModuleRow], symbols: list[SymbolRow]) -> list[str]:
    listed = {row.old for row in modules} | {row.new for row in modules}
    notes = [
        f"{row.module}: {row.old} is listed twice"
        for row in _twice(symbols, lambda r: (r.kind, r.module, r.old))
    ]
    for row in symbols:
        known = (
            "/v1/" in row.module or row.kind in ("name", "flag", "metric") or row.module in listed
        )
        if not known:
            notes.append(f"{row.module}: not in modules.tsv ({row.old})")
        if row.kind == "class" and not re.fullmatch(r"_?[A-Z]\w+", row.new):
            notes.append(f"{row.new}: not a name of a class")
        same_case = row.old.rsplit(".", 1)[-1].isupper() == row.new.isupper()
        if row.kind in ("function", "method") and row.new != row.new.lower():
            notes.append(f"{row.new}: not a name of a function or field")
        if row.kind in ("constant", "field") and not same_case and not row.new[0].isupper():
            notes.append(f"{row.new}: not a name of a constant")
    # Two members of one class, or two names of one (new) module, that get the same name.
    new_paths = {row.old: row.new for row in modules}
    for row in _twice(
        [r for r in symbols if r.kind in ("class", "function", "method", "field", "constant")],
        lambda r: (new_paths.get(r.module, r.module), r.old.rpartition(".")[0], r.new),
    ):
        notes.append(f"{row.module}: {row.old} -> {row.new}: another one gets that name there")
    return notes


def _check_classes(root: Path, modules: list[ModuleRow], symbols: list[SymbolRow]) -> list[str]:
    """Public class names that would be in two places afterwards."""
    renamed = {(row.module, row.old): row.new for row in symbols if row.kind == "class"}
    where: defaultdict[str, list[str]] = defaultdict(list)
    for row in modules:
        path = next((p for p in (row.old, row.new) if (root / p).is_file()), None)
        if path is None or not path.endswith(".py"):
            continue
        for node in ast.parse((root / path).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[renamed.get((row.old, node.name), node.name)].append(row.new)
    allowed = _allowed(root)
    return [
        f"class {name} is in {', '.join(sorted(paths))}"
        for name, paths in sorted(where.items())
        if len(paths) > 1 and name not in allowed
    ]


def _allowed(root: Path) -> set[str]:
    """Class names that may be in several places, of allowed.tsv."""
    path = root / "tools/rename/allowed.tsv"
    if not path.is_file():
        return set()
    return {line.split("\t")[0] for line in path.read_text().split("\n")[1:] if line}
