"""Moves modules: files, imports, names of modules in any text, and the lists that name modules."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from tools.rename.edits import FUNCTIONS, Edit, Edits, bound_names, uses_of
from tools.rename.merges import merge_modules
from tools.rename.tables import GENERATED, ModuleRow, dotted, read_packages, tracked
from tools.rename.wheel import compiled_modules, rewrite_wheel_lists

SKIPPED: Final = ("tools/rename/", "benchmarks/results/", "CHANGELOG.md", "heads/")
"""Files whose text keeps the old names: tables of renames, measurements, what was released."""
TEXTS: Final = (
    *(".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", ".txt", ".tpl", ".html"),
    *(".proto", ".in", ".cfg", ".svg"),
)
NAMES: Final = ("Makefile", "Dockerfile", ".dockerignore", ".gitattributes", "run")


def move_modules(root: Path, rows: Sequence[ModuleRow], *, merge: bool) -> list[str]:
    """Move these modules, and merge those that are marked so if `merge`. Returns what needs a look.

    Raises ValueError where a module of a merge is compiled and another is not.
    """
    notes: list[str] = []
    chosen = [row for row in rows if row.old != row.new and (root / row.old).is_file()]
    merged = [row for row in chosen if row.mark == "merge"]
    moved = [row for row in chosen if row.mark in ("", "data")]
    if not merge:
        merged = []
    compiled = compiled_modules(root)
    _check_compiled(root, compiled, [*moved, *merged], rows)
    modules = {
        dotted(row.old): dotted(row.new) for row in [*moved, *merged] if row.old.endswith(".py")
    }
    # Names first: an import that is rewritten may name a package as a module was named before.
    _rewrite_texts(root, modules, {row.old: row.new for row in [*moved, *merged]})
    by_import = _as_imported(modules)
    for path in tracked(root, "*.py"):
        if not path.startswith(SKIPPED):
            notes += _rewrite_imports(root, path, by_import)
    _rename_listed_commands(root, modules)
    for row in moved:
        target = root / row.new
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", row.old, row.new], cwd=root, check=True)
    _make_packages(root, [row for row in rows if row in moved or row.old == row.new])
    for new in sorted({row.new for row in merged}):
        parts = [row.old for row in merged if row.new == new]
        notes += merge_modules(root, new, parts)
        subprocess.run(["git", "rm", "-q", "-f", *parts], cwd=root, check=True)
    describe_packages(root, [row for row in rows if row.mark != "hook"], moved)
    rewrite_wheel_lists(root, compiled, {row.old: row.new for row in [*moved, *merged]})
    return notes


def _check_compiled(
    root: Path, compiled: set[str], chosen: Sequence[ModuleRow], rows: Sequence[ModuleRow]
) -> None:
    targets = {row.new for row in chosen}
    for target in sorted(targets):
        found = [row for row in rows if row.new == target and row.mark in ("", "merge")]
        parts = [row.old if (root / row.old).is_file() else row.new for row in found]
        if len({part in compiled for part in parts}) > 1:
            raise ValueError(f"{target}: some of {parts} are compiled and others are not")


def _as_imported(modules: Mapping[str, str]) -> dict[str, str]:
    """Modules by the names that `from package import module` gives them by now: a package that
    was moved itself has its new name there.
    """
    found = dict(modules)
    for old, new in modules.items():
        package, _, leaf = old.rpartition(".")
        found.setdefault(f"{modules.get(package, package)}.{leaf}", new)
    return found


def _rewrite_imports(root: Path, path: str, modules: Mapping[str, str]) -> list[str]:
    """`from package import module`: the module has another package now, or another name."""
    source = (root / path).read_text()
    tree = ast.parse(source)
    statements: list[tuple[ast.ImportFrom, str]] = []
    edits, notes = Edits(), []
    scopes: list[ast.AST] = [tree, *(n for n in ast.walk(tree) if isinstance(n, FUNCTIONS))]
    for scope in scopes:
        for node in _imports_of(scope):
            moved = {a.name: modules.get(f"{node.module}.{a.name}") for a in node.names}
            if not any(moved.values()):
                continue
            lines = []
            for alias in node.names:
                new, local = moved[alias.name], alias.asname or alias.name
                if new is None:
                    lines.append(f"from {node.module} import {_as(alias.name, alias.asname)}")
                    continue
                package, leaf = new.rsplit(".", 1)
                wanted = alias.asname or leaf
                taken = _taken(tree)
                if wanted != local and wanted in taken:
                    notes.append(f"{path}: `{wanted}` is taken, so {new} stays `{local}` there")
                    wanted = local
                lines.append(f"from {package} import {_as(leaf, wanted)}")
                if wanted != local:
                    for use in uses_of(scope, local):
                        edits.add(path, Edit(use.lineno, use.col_offset, local, wanted))
            statements.append((node, lines_of(lines, node.col_offset)))
    edits.apply(root)
    if statements:
        rows = (root / path).read_text().split("\n")
        for node, text in sorted(statements, key=lambda pair: -pair[0].lineno):
            rows[node.lineno - 1 : node.end_lineno] = text.split("\n")
        (root / path).write_text("\n".join(rows))
    return notes


def _taken(tree: ast.AST) -> set[str]:
    scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))]
    return set().union(*(bound_names(scope) for scope in scopes))


def _imports_of(scope: ast.AST) -> list[ast.ImportFrom]:
    """Import statements that bind names of this scope."""
    found, waiting = [], list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node)
        elif not isinstance(node, FUNCTIONS):
            waiting += ast.iter_child_nodes(node)
    return found


def _as(name: str, local: str | None) -> str:
    return name if local in (None, name) else f"{name} as {local}"


def lines_of(statements: Sequence[str], indent: int) -> str:
    """Statements one below the other, indented."""
    return "\n".join(" " * indent + statement for statement in statements)


def _rewrite_texts(root: Path, modules: Mapping[str, str], paths: Mapping[str, str]) -> None:
    if not modules and not paths:
        return
    names = _pattern(modules)
    files = _pattern(paths)
    for path in tracked(root):
        if path.startswith(SKIPPED) or GENERATED in path or path == "tools/compiled_wheel.py":
            continue
        if not path.endswith(TEXTS) and PurePosixPath(path).name.split(".")[-1] not in NAMES:
            continue
        text = (root / path).read_text()
        new = names.sub(lambda match: modules[match[0]], text) if names else text
        new = files.sub(lambda match: paths[match[0]], new) if files else new
        if new != text:
            (root / path).write_text(new)


def _pattern(names: Mapping[str, str]) -> re.Pattern[str] | None:
    if not names:
        return None
    longest = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, longest))})(?![\w-]|\.py\b)")


def _rename_listed_commands(root: Path, modules: Mapping[str, str]) -> None:
    """The benchmarks' command line names modules below its package, without the package."""
    path = root / "benchmarks/outrider_bench/__main__.py"
    text = path.read_text()
    for old, new in modules.items():
        if old.startswith("outrider_bench."):
            before, after = (name.removeprefix("outrider_bench.") for name in (old, new))
            text = re.sub(rf'(": \(\s*)"{re.escape(before)}",', rf'\1"{after}",', text)
    path.write_text(text)


def _make_packages(root: Path, rows: Sequence[ModuleRow]) -> None:
    for row in rows:
        for folder in PurePosixPath(row.new).parents:
            # A package begins below the folders in which Python looks for packages.
            if "outrider" not in str(folder) or not row.new.endswith(".py"):
                break
            if not (root / folder / "__init__.py").exists():
                (root / folder / "__init__.py").write_text('"""."""\n')
                subprocess.run(["git", "add", f"{folder}/__init__.py"], cwd=root, check=True)


def describe_packages(root: Path, rows: Sequence[ModuleRow], moved: Sequence[ModuleRow]) -> None:
    """Write the docstrings of packages in packages.tsv: a paragraph, and a line for each file."""
    purposes: dict[str, str] = {}
    for row in rows:
        if (root / row.new).is_file():
            purposes.setdefault(row.new, row.purpose)
    for folder, paragraph in read_packages(root).items():
        init = root / folder / "__init__.py"
        if not init.is_file() or not any(row.new.startswith(f"{folder}/") for row in moved):
            continue
        lines = []
        names = sorted(p.name for p in (root / folder).glob("*.py") if p.name != "__init__.py")
        for name in names:
            lines += _item(name, purposes.get(f"{folder}/{name}", ""))
        tree = ast.parse(init.read_text())
        text = "\n".join([_wrap(paragraph), "", *lines])
        rest = init.read_text().split("\n")
        if ast.get_docstring(tree) is not None:
            rest = rest[tree.body[0].end_lineno or 1 :]
        init.write_text(f'"""{text}\n"""\n' + "\n".join(rest).lstrip("\n"))
        if "\n".join(rest).strip():
            init.write_text(f'"""{text}\n"""\n\n' + "\n".join(rest).lstrip("\n"))


def _item(name: str, purpose: str) -> list[str]:
    head = f"    {name:<26} "
    words, lines, line = purpose.split(), [], head
    for word in words:
        if len(line) + len(word) > 98 and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word + " "
    return [*lines, line.rstrip()]


def _wrap(paragraph: str) -> str:
    lines, line = [], ""
    for word in paragraph.split():
        if len(line) + len(word) > 96:
            lines.append(line.rstrip())
            line = ""
        line += word + " "
    return "\n".join([*lines, line.rstrip()])
