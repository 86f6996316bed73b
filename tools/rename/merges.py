"""Merges modules that were one idea into one file."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tools.rename.edits import Edit, Edits, uses_of
from tools.rename.tables import dotted


class _Part(NamedTuple):
    path: str
    doc: str
    imports: list[str]
    body: list[str]
    """Source of each top-level statement, with the comments before it."""
    names: dict[str, int]
    """Top-level names, and the statement of `body` that defines each."""


def merge_modules(root: Path, new: str, others: Sequence[str]) -> list[str]:
    """Move what is in `others` to the module `new`, which imports them by its own name by now.

    Raises ValueError where two of them define the same public name differently.
    """
    notes: list[str] = []
    paths = [new, *others]
    for path in paths:
        _drop_own_imports(root, path, dotted(new))
    for path in others:
        _rename_private_clashes(root, path, [one for one in paths if one != path])
    parts = [_read(root, path) for path in _in_order(root, paths)]
    main = next(part for part in parts if part.path == new)
    docs = [main.doc, *(part.doc for part in parts if part is not main)]
    seen: dict[str, str] = {}
    body: list[str] = []
    for part in parts:
        for statement in part.body:
            defined = [name for name, at in part.names.items() if part.body[at] is statement]
            if defined and all(seen.get(name) == statement.strip() for name in defined):
                continue
            for name in defined:
                if name in seen:
                    raise ValueError(f"{new}: `{name}` is defined in several of {paths}")
                seen[name] = statement.strip()
            body.append(statement)
    imports = list(dict.fromkeys(line for part in parts for line in part.imports))
    _check_imports(new, imports)
    text = "\n\n".join(doc.rstrip() for doc in docs if doc)
    future = "from __future__ import annotations"
    head = [f'"""{text}\n"""', "", future, "", *(i for i in imports if i != future), "", ""]
    (root / new).write_text("\n".join(head) + "\n".join(body) + "\n")
    notes.append(f"{new}: merged from {', '.join(paths)}; read its docstring and its order")
    return notes


def _check_imports(new: str, imports: Sequence[str]) -> None:
    """Raises ValueError where two parts mean different things by one imported name."""
    sources: dict[str, str] = {}
    for node in ast.walk(ast.parse("\n".join(imports))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                local, source = alias.asname or alias.name, f"{node.module}.{alias.name}"
                if sources.setdefault(local, source) != source:
                    raise ValueError(f"{new}: `{local}` is {source} and {sources[local]}")


def _drop_own_imports(root: Path, path: str, module: str) -> None:
    """Imports of the merged module from itself go, and `module.name` becomes `name`."""
    package, leaf = module.rsplit(".", 1)
    source = (root / path).read_text()
    tree = ast.parse(source)
    rows = source.split("\n")
    edits = Edits()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        aliases = [a for a in node.names if node.module == package and a.name == leaf]
        for alias in aliases:
            local = alias.asname or leaf
            places = {(use.lineno, use.col_offset) for use in uses_of(tree, local)}
            for line, column in places:
                edits.add(path, Edit(line, column, f"{local}", ""))
        if node.module == module or aliases:
            left = [a for a in node.names if node.module != module and a not in aliases]
            keep = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in left)
            kept = f"from {node.module} import {keep}" if keep else ""
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            rows[node.lineno - 1] = " " * node.col_offset + kept if kept else ""
            for index in range(node.lineno, node.lineno + count - 1):
                rows[index] = ""
    (root / path).write_text("\n".join(rows))
    edits.apply(root)
    if edits.files:
        text = (root / path).read_text()
        # What is left of `module.name` after its first part was taken away.
        (root / path).write_text(re.sub(r"(?<![\w)\]\"'}.])\.(?=[A-Za-z_])", "", text))


def _rename_private_clashes(root: Path, path: str, others: Sequence[str]) -> None:
    """A private name that another part defines otherwise gets the part's name as a suffix."""
    taken: dict[str, str] = {}
    for other in others:
        part = _read(root, other)
        taken |= {name: part.body[at].strip() for name, at in part.names.items()}
    mine = _read(root, path)
    tree = ast.parse((root / path).read_text())
    edits = Edits()
    stem = PurePosixPath(path).stem
    for name, at in mine.names.items():
        clash = name in taken and taken[name] != mine.body[at].strip()
        if not clash or not name.startswith("_"):
            continue
        new = f"{name}_{stem}" if name.islower() else f"{name}{stem.title().replace('_', '')}"
        for use in uses_of(tree, name):
            edits.add(path, Edit(use.lineno, use.col_offset, name, new))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                word = {"FunctionDef": "def ", "AsyncFunctionDef": "async def "}
                offset = len(word.get(type(node).__name__, "class "))
                if node.name == name:
                    edits.add(path, Edit(node.lineno, node.col_offset + offset, name, new))
    edits.apply(root)


def _in_order(root: Path, paths: Sequence[str]) -> list[str]:
    """The first module last: it used the others, which therefore come before it."""
    return [*paths[1:], paths[0]]


def _read(root: Path, path: str) -> _Part:
    source = (root / path).read_text()
    tree = ast.parse(source)
    rows = source.split("\n")
    doc = ast.get_docstring(tree, clean=False) or ""
    imports: list[str] = []
    body: list[str] = []
    names: dict[str, int] = {}
    before = tree.body[0].end_lineno or 1 if doc else 0
    statements = tree.body[1:] if doc else tree.body
    for node in statements:
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([first, *(d.lineno for d in node.decorator_list)])
        end = node.end_lineno or node.lineno
        checked = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if checked or isinstance(node, ast.Import | ast.ImportFrom):
            imports.append("\n".join(rows[first - 1 : end]))
        else:
            text = "\n".join(rows[before:end])
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_text and body:
                body[-1] += text if text.startswith("\n") else "\n" + text.lstrip("\n")
            else:
                body.append(text)
            for name in _defined(node):
                names[name] = len(body) - 1
        before = end
    return _Part(path, doc, imports, body, names)


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            every = [part for target in targets for part in ast.walk(target)]
            return [part.id for part in every if isinstance(part, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []
