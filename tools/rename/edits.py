"""Replacements in source text by line and byte column, and names bound in scopes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Edit(NamedTuple):
    """Replace `old`, which stands at a line (from 1) and a byte column (from 0), by `new`."""

    line: int
    column: int
    old: str
    new: str


class Edits:
    """Replacements by file, applied together."""

    def __init__(self) -> None:
        self._by_file: defaultdict[str, set[Edit]] = defaultdict(set)

    def add(self, path: str, edit: Edit) -> None:
        """Note a replacement; the same one may come more than once."""
        self._by_file[path].add(edit)

    @property
    def files(self) -> list[str]:
        """Files with replacements."""
        return sorted(self._by_file)

    def apply(self, root: Path) -> list[str]:
        """Write all files. Returns replacements that were left out: other text stood there."""
        refused = []
        for path, edits in sorted(self._by_file.items()):
            lines = (root / path).read_bytes().split(b"\n")
            taken: set[tuple[int, int]] = set()
            for edit in sorted(edits, reverse=True):
                old, line = edit.old.encode(), lines[edit.line - 1]
                end = edit.column + len(old)
                follows = line[end : end + 1]
                whole = not (follows.isalnum() or follows == b"_")
                if line[edit.column : end] != old or not whole or edit[:2] in taken:
                    refused.append(f"{path}:{edit.line}:{edit.column}: {edit.old} -> {edit.new}")
                    continue
                taken.add((edit.line, edit.column))
                lines[edit.line - 1] = line[: edit.column] + edit.new.encode() + line[end:]
            (root / path).write_bytes(b"\n".join(lines))
        return refused


def bound_names(scope: ast.AST) -> set[str]:
    """Names that a function, a lambda, a comprehension or a module binds itself."""
    names: set[str] = set()
    if isinstance(scope, FUNCTIONS):
        every = scope.args
        found = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        names |= {argument.arg for argument in found if argument is not None}
    outside: set[str] = set()
    for node in own_nodes(scope):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.Import(names=found_aliases) | ast.ImportFrom(names=found_aliases):
                names |= {a.asname or a.name.split(".")[0] for a in found_aliases}
            case ast.Global(names=free) | ast.Nonlocal(names=free):
                outside |= set(free)
    return names - outside


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes within a scope, functions in it as their `def` alone."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, FUNCTIONS):
            waiting += [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]
            if not isinstance(node, ast.Lambda):
                waiting += node.decorator_list
        elif not isinstance(node, COMPREHENSIONS):
            waiting += ast.iter_child_nodes(node)


def uses_of(scope: ast.AST, name: str) -> Iterator[ast.Name]:
    """Where code of a scope, nested functions included, means the scope's own `name`."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, FUNCTIONS) and name in bound_names(node):
            for part in [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]:
                yield from _uses_in(part, name)
            continue
        if isinstance(node, COMPREHENSIONS) and name in _targets(node):
            continue
        yield from _uses_in(node, name)


def _targets(node: ast.AST) -> set[str]:
    generators = getattr(node, "generators", [])
    parts = [part for generator in generators for part in ast.walk(generator.target)]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _uses_in(node: ast.AST, name: str) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name) and node.id == name:
        yield node
    yield from uses_of(node, name)
