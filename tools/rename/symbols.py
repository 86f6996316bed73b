"""Renames symbols: members, functions, classes and fields by types; settings, flags, metrics and
fields of protocol messages also in text.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tools.rename.edits import FUNCTIONS, Edit, Edits, bound_names
from tools.rename.index import Index, Key, Place
from tools.rename.moves import NAMES, SKIPPED, TEXTS
from tools.rename.tables import (
    GENERATED,
    SymbolRow,
    current_path,
    dotted,
    read_modules,
    tracked,
)

TYPED: Final = ("class", "function", "method", "field", "constant", "param", "setting", "proto")
"""Kinds that are found by types."""
COMMON: Final = frozenset(
    name
    for kind in (
        np.ndarray,
        torch.Tensor,
        list,
        dict,
        set,
        str,
        bytes,
        tuple,
        int,
        float,
        object,
        BaseException,
    )
    for name in dir(kind)
) | frozenset(dir(builtins))
"""Names that objects of other projects have: never renamed where no type is known."""


def rename_symbols(root: Path, rows: Sequence[SymbolRow]) -> list[str]:
    """Rename; returns what was left out, and places that need a look."""
    index = Index(root)
    renames = _Renames(root, index)
    for row in rows:
        renames.take(row)
    notes = renames.finish()
    notes += _in_text(root, rows)
    return notes


class _Renames:
    def __init__(self, root: Path, index: Index) -> None:
        self._root, self._index = root, index
        self._paths = current_path(root, read_modules(root))
        self._edits = Edits()
        self._new: dict[Key, tuple[str, SymbolRow]] = {}
        self._planned: dict[tuple[str, str], Key] = {}
        """New names of symbols of modules, by the files that they are in."""
        self._notes: list[str] = []
        self._trees: dict[str, ast.Module] = {}
        self._leaves: defaultdict[str, set[Key]] = defaultdict(set)
        for key in index.places:
            self._leaves[key[1].rsplit(".", 1)[-1]].add(key)

    def take(self, row: SymbolRow) -> None:
        """Plan a row's edits, or note why not."""
        if row.kind == "name":
            self._take_names(row)
        elif row.kind in TYPED and row.module.endswith((".py", ".pyi")):
            self._take_key(row)

    def _take_key(self, row: SymbolRow) -> None:
        module = dotted(self._paths.get(row.module, row.module).removesuffix(".pyi"))
        key = (module, row.old)
        where = f"{row.module}: {row.old} -> {row.new}"
        if not self._index.places.get(key):
            self._notes.append(f"{where}: not found")
            return
        group = self._index.group(key) if row.kind != "param" else {key}
        foreign = [k for k in group if k[0] not in self._index.paths]
        if foreign:
            self._notes.append(f"{where}: also a member of {foreign[0]}, which is not ours")
            return
        for one in sorted(group):
            told = self._new.get(one)
            if told is not None and told[0] != row.new:
                self._notes.append(f"{where}: another row names {one} `{told[0]}`")
                return
        if problem := self._problem(row, group):
            self._notes.append(f"{where}: {problem}")
            return
        old = row.old.rsplit(".", 1)[-1]
        for one in group:
            self._new[one] = (row.new, row)
            for place in self._index.places[one]:
                self._edit(place, old, row.new)

    def _problem(self, row: SymbolRow, group: Iterable[Key]) -> str:
        for key in group:
            if "." not in key[1] and row.kind != "proto":
                for path in {place[0] for place in self._index.places[key]}:
                    other = self._planned.setdefault((path, row.new), key)
                    if other != key:
                        return f"`{row.new}` is also the new name of {other} in {path}"
            if "." in key[1] and row.kind != "param":
                if row.new in self._index.members(key):
                    return f"{key} has a member `{row.new}`"
                continue
            for path, line, _ in self._index.places[key]:
                for scope in self._scopes(path, line, whole=row.kind != "param"):
                    alias = f"{row.old} as {row.new}"
                    if row.new in bound_names(scope) and alias not in self._source(path):
                        return f"`{row.new}` means something else in {path}:{line}"
        return ""

    def _scopes(self, path: str, line: int, *, whole: bool) -> Iterator[ast.AST]:
        tree = self._tree(path)
        if whole:
            yield tree
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.lineno <= line <= (node.end_lineno or 0):
                yield node

    def _source(self, path: str) -> str:
        return (self._root / path).read_text()

    def _tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse((self._root / path).read_bytes())
        return self._trees[path]

    def _take_names(self, row: SymbolRow) -> None:
        """Variables, parameters and private attributes of this name, in files below a folder."""
        folder = self._paths.get(row.module, row.module)
        for (path, name), places in list(self._index.locals.items()):
            if name != row.old or not path.startswith(folder):
                continue
            tree = self._tree(path)
            outer = [node for node in _outermost(tree)]
            for function in outer:
                end = function.end_lineno or function.lineno
                inside = {p for p in places if function.lineno <= p[1] <= end}
                if not inside:
                    continue
                if row.new in _all_names(function):
                    at = f"{path}:{function.lineno}"
                    self._notes.append(f"{at}: `{row.old}` stays: `{row.new}` is used there")
                    continue
                for place in inside:
                    self._edit(place, row.old, row.new)
                self._rename_parameter(path, function, row)
        private = f"_{row.old}"
        for key in list(self._leaves[private]):
            path = self._index.paths.get(key[0], "")
            if path.startswith(folder) and "." in key[1] and key not in self._new:
                if f"_{row.new}" in self._index.members(key):
                    self._notes.append(f"{key}: `{private}` stays: `_{row.new}` is there")
                    continue
                group = self._index.group(key)
                for one in group:
                    self._new[one] = (f"_{row.new}", row)
                    for place in self._index.places[one]:
                        self._edit(place, private, f"_{row.new}")

    def _rename_parameter(self, path: str, function: ast.AST, row: SymbolRow) -> None:
        """Keywords of calls follow a renamed parameter."""
        module = next((m for m, p in self._index.paths.items() if p == path), "")
        name = getattr(function, "name", "")
        for key in self._leaves[row.old]:
            parts = key[1].split(".")
            if key[0] == module and len(parts) > 1 and parts[-2] == name:
                for place in self._index.places[key]:
                    self._edit(place, row.old, row.new)

    def _edit(self, place: Place, old: str, new: str) -> None:
        path, line, column = place
        self._edits.add(path, Edit(line, column, old, new))

    def finish(self) -> list[str]:
        """Write the files. Returns the notes."""
        self._rename_untyped()
        refused = self._edits.apply(self._root)
        # Aliases (`import x as y`) and generated constructors have no such text.
        return [*self._notes, *(f"other text stands at {one}" for one in refused)]

    def _rename_untyped(self) -> None:
        wanted: defaultdict[str, set[str]] = defaultdict(set)
        for key, (new, _) in self._new.items():
            if "." in key[1]:
                wanted[key[1].rsplit(".", 1)[-1]].add(new)
        for old, names in wanted.items():
            members = self._members_named(old)
            sure = len(names) == 1 and members <= set(self._new) and old not in COMMON
            places = sorted(self._index.untyped.get(old, ()))
            if sure:
                for place in places:
                    self._edit(place, old, next(iter(names)))
                continue
            places = [place for place in places if not self._narrow(place, old, members)]
            if places and old not in COMMON:
                at = ", ".join(f"{path}:{line}" for path, line, _ in places[:12])
                self._notes.append(f"`.{old}` of no known type stays in {len(places)} places: {at}")

    def _members_named(self, name: str) -> set[Key]:
        """Members of classes; parameters of functions have keys of the same form."""
        classes = self._index.infos
        return {k for k in self._leaves[name] if f"{k[0]}.{k[1].rpartition('.')[0]}" in classes}

    def _narrow(self, place: Place, old: str, members: set[Key]) -> bool:
        """Where no type is known, a member of what the file imports is meant, if that is one."""
        if old in COMMON:
            return False
        imported = self._imports(place[0])
        chosen = {key for key in members if key[0] in imported}
        if not chosen:
            package = _package_of_tests(place[0])
            chosen = {key for key in members if package and key[0].startswith(package)}
        names = {self._new[key][0] if key in self._new else old for key in chosen}
        if len(names) != 1:
            return False
        if (new := next(iter(names))) != old:
            self._edit(place, old, new)
        return True

    def _imports(self, path: str) -> set[str]:
        module = next((m for m, p in self._index.paths.items() if p == path), "")
        found = {module}
        for node in ast.walk(self._tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found


def _package_of_tests(path: str) -> str:
    """The package that a folder of unit tests is about; "" if that is not said."""
    parts = path.split("/")
    if parts[:2] != ["tests", "unit"] or len(parts) < 4:
        return ""
    process = parts[2] in ("verifier", "drafter", "router")
    return f"outrider_{parts[2]}" if process else f"outrider.{parts[2]}"


def _outermost(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, FUNCTIONS):
                yield node
            else:
                waiting.append(node)


def _all_names(function: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return names | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def _in_text(root: Path, rows: Sequence[SymbolRow]) -> list[str]:
    """Mentions in backquotes, keys of settings, flags, metrics and fields of messages."""
    patterns: list[tuple[re.Pattern[str], str, str]] = []
    """Pattern, replacement, and the suffixes of the files that are meant."""
    leaves: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows:
        old = row.old.rsplit(".", 1)[-1]
        if row.kind in TYPED and row.kind != "param":
            leaves[old].add(row.new)
            if "." in row.old:
                dotted_old = ".".join(row.old.split(".")[-2:])
                owner = dotted_old.split(".")[0]
                patterns.append((_quoted(dotted_old), f"`{owner}.{row.new}", ""))
        if row.kind == "setting":
            patterns += _setting(old, row.new)
        elif row.kind == "flag":
            bare, new = old.removeprefix("--"), row.new.removeprefix("--")
            patterns.append((re.compile(rf"(?<![\w-])--{bare}(?![\w-])"), f"--{new}", ""))
        elif row.kind == "metric":
            patterns.append((re.compile(rf"(?<![A-Za-z0-9.`]){old}(?=_|\b)"), row.new, "metric"))
        elif row.kind == "proto":
            patterns.append((re.compile(rf'"{old}"'), f'"{row.new}"', "outrider/wire/"))
            _rename_proto_field(root, row)
    for old, names in leaves.items():
        if len(names) == 1 and (old[0].isupper() or "_" in old):
            patterns.append((_quoted(old), f"`{next(iter(names))}", ""))
    _replace(root, patterns)
    return []


def _quoted(name: str) -> re.Pattern[str]:
    return re.compile(rf"`{re.escape(name)}(?=[`.(\[])")


def _setting(old: str, new: str) -> list[tuple[re.Pattern[str], str, str]]:
    found = [
        (re.compile(rf"(?m)^(\s*#?\s*){old}(\s*=)"), rf"\g<1>{new}\g<2>", ".toml"),
        (re.compile(rf"(OUTRIDER_[A-Z]+_){old.upper()}\b"), rf"\g<1>{new.upper()}", ""),
        (re.compile(rf"`{old}(?=[` =])"), f"`{new}", ".md"),
        (re.compile(rf'(?m)^(\s*(?:- )?"?){old}("?:)'), rf"\g<1>{new}\g<2>", ".yaml"),
    ]
    flag = old.replace("_", "-")
    found.append((re.compile(rf"(?<![\w-])--{flag}(?![\w-])"), f"--{new.replace('_', '-')}", ""))
    if "_" in old:
        found.append((re.compile(rf"(?<![\w.]){old}(?!\w)"), new, "string"))
    return found


def _rename_proto_field(root: Path, row: SymbolRow) -> None:
    if "." not in row.old:
        for path in tracked(root, "*.proto"):
            text = (root / path).read_text()
            (root / path).write_text(re.sub(rf"\b{row.old}\b", row.new, text))
        return
    message, field = row.old.rsplit(".", 1)
    for path in tracked(root, "*.proto"):
        text = (root / path).read_text()
        found = re.search(rf"(?ms)^message {message} \{{.*?^\}}", text)
        if found is None:
            continue
        block = re.sub(rf"\b{field}( = \d+)", rf"{row.new}\g<1>", found[0])
        (root / path).write_text(text[: found.start()] + block + text[found.end() :])


def _replace(root: Path, patterns: Sequence[tuple[re.Pattern[str], str, str]]) -> None:
    for path in tracked(root):
        if path.startswith(SKIPPED) or GENERATED in path:
            continue
        if not path.endswith(TEXTS) and path.rsplit("/", 1)[-1] not in NAMES:
            continue
        text = new = (root / path).read_text()
        for pattern, replacement, where in patterns:
            if where in ("string", "metric") and path.endswith(".py"):
                new = in_strings(new, pattern, replacement)
            elif where in ("string", "metric") or path.endswith(where) or path.startswith(where):
                new = pattern.sub(replacement, new)
        if new != text:
            (root / path).write_text(new)


def in_strings(source: str, pattern: re.Pattern[str], replacement: str) -> str:
    """Replace within string literals of Python source alone."""
    if not pattern.search(source):
        return source
    rows = source.split("\n")
    spans: Mapping[int, list[tuple[int, int]]] = _string_spans(source)
    for number, parts in spans.items():
        row = rows[number].encode()
        for begin, end in sorted(parts, reverse=True):
            end = min(end, len(row))
            pieces = re.split(r"(\{[^{}]*\})", row[begin:end].decode(errors="replace"))
            # What stands in the braces of an f-string is code.
            code = row[begin : begin + 2].lower().startswith((b"f", b"rf"))
            new = [
                pattern.sub(replacement, p) if not i % 2 or not code else p
                for i, p in enumerate(pieces)
            ]
            part = "".join(new)
            row = row[:begin] + part.encode() + row[end:]
        rows[number] = row.decode()
    return "\n".join(rows)


def _string_spans(source: str) -> dict[int, list[tuple[int, int]]]:
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if not is_text and not isinstance(node, ast.JoinedStr):
            continue
        assert isinstance(node, ast.expr)
        last = node.end_lineno or node.lineno
        for line in range(node.lineno, last + 1):
            begin = node.col_offset if line == node.lineno else 0
            end = node.end_col_offset if line == last and node.end_col_offset else 1 << 30
            span = (begin, end)
            if not any(b <= begin and end <= e for b, e in spans[line - 1]):
                spans[line - 1] = [s for s in spans[line - 1] if not _inside(s, span)] + [span]
    return spans


def _inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]
