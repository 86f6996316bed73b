"""Who refers to what: every reference to a class, a function, a member or a variable, by mypy's
types over the whole repository, tests included.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from mypy import build, nodes, types
from mypy.config_parser import parse_config_file
from mypy.find_sources import create_source_list
from mypy.options import Options
from mypy.typestate import type_state

from tools.rename.edits import bound_names, own_nodes
from tools.rename.tables import dotted, tracked

SOURCES: Final = (
    *("outrider", "drafter/outrider_drafter", "verifier/outrider_verifier"),
    *("router/outrider_router", "benchmarks", "deploy", "tests"),
)
TYPED: Final = ("numpy", "typing_extensions")
"""Packages of others whose types are looked at; the rest would take minutes and tell nothing."""

Key = tuple[str, str]
"""("module", "Class.member") or ("module", "function.parameter") or ("module", "name")."""
Span = tuple[int, int, int, int]
Place = tuple[str, int, int]
"""Path, line (from 1) and byte column of a name."""

NAMED_BY_STRINGS: Final = {"getattr", "setattr", "hasattr", "delattr", "object", "attrgetter"}


class Index:
    """References by key, and which members must have one name because one overrides the other."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.places: defaultdict[Key, set[Place]] = defaultdict(set)
        self.locals: defaultdict[tuple[str, str], set[Place]] = defaultdict(set)
        """Of (path, name): variables of functions, parameters included, by where they are."""
        self.untyped: defaultdict[str, set[Place]] = defaultdict(set)
        """Members of what mypy knows no type of, by name."""
        self.infos: dict[str, nodes.TypeInfo] = {}
        self.paths: dict[str, str] = {}
        """Paths of modules by name."""
        self._build()
        self._groups = _Groups(self.infos)

    def group(self, key: Key) -> set[Key]:
        """All members that have the name of this one because of inheritance or a protocol."""
        return self._groups.of(key)

    def members(self, key: Key) -> set[str]:
        """Names that a class has already, inherited ones included; of (module, "Class.name")."""
        info = self.infos.get(f"{key[0]}.{key[1].rsplit('.', 1)[0]}")
        return set() if info is None else {name for base in info.mro for name in base.names}

    def _build(self) -> None:
        options = Options()
        parse_config_file(options, lambda: None, "pyproject.toml", sys.stdout, sys.stderr)
        options.incremental = False
        options.export_types = True
        options.preserve_asts = True
        options.python_executable = sys.executable
        options.warn_unreachable = False
        for package in _others():
            skipped: dict[str, object] = {
                "follow_imports": "skip",
                "ignore_missing_imports": True,
            }
            options.per_module_options[f"{package}.*"] = skipped
        sources = create_source_list([s for s in SOURCES if (self._root / s).exists()], options)
        result = build.build(sources, options)
        wanted = set(tracked(self._root, "*.py", "*.pyi"))
        trees = {}
        for state in result.graph.values():
            path = _relative(self._root, state.path)
            if state.tree is not None and path in wanted:
                trees[path] = state.tree
                self.paths[state.tree.fullname] = path
        for tree in trees.values():
            self._learn_classes(tree.names)
        for path, tree in trees.items():
            _Definitions(self, path, tree.fullname).visit(
                ast.parse((self._root / path).read_bytes())
            )
            source = ast.parse((self._root / path).read_bytes())
            _References(self, path, tree, result).visit(source)
            self._imports(path, tree, result.files)

    def _learn_classes(self, names: nodes.SymbolTable) -> None:
        for symbol in names.values():
            info = symbol.node
            if isinstance(info, nodes.TypeInfo) and info.fullname not in self.infos:
                self.infos[info.fullname] = info
                self._learn_classes(info.names)

    def _imports(self, path: str, tree: nodes.MypyFile, files: dict[str, nodes.MypyFile]) -> None:
        for node in ast.walk(ast.parse((self._root / path).read_bytes())):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            source = files.get(node.module)
            for alias in node.names:
                symbol = None if source is None else source.names.get(alias.name)
                key = None if symbol is None else key_of(symbol.node)
                if key is None:
                    continue
                self.places[key].add((path, alias.lineno, alias.col_offset))
                if alias.asname == alias.name:
                    # `x as x`, which marks what is exported again.
                    column = alias.col_offset + len(f"{alias.name} as ".encode())
                    self.places[key].add((path, alias.lineno, column))


def _others() -> set[str]:
    """Names of installed packages but those in TYPED."""
    folder = Path(build.__file__).parent.parent
    names = {path.stem for path in folder.iterdir() if path.suffix in ("", ".py", ".pyi")}
    return {name for name in names if name.isidentifier()} - set(TYPED) - {"outrider"}


def _relative(root: Path, path: str | None) -> str:
    if path is None:
        return ""
    full = (root / path).resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else ""


def key_of(node: nodes.SymbolNode | None) -> Key | None:
    """The key of a symbol of a module; None of what is no symbol of one."""
    if isinstance(node, nodes.Decorator):
        node = node.func
    if isinstance(node, nodes.TypeInfo):
        return node.module_name, node.fullname.removeprefix(node.module_name + ".")
    if isinstance(node, nodes.MypyFile) or node is None or "." not in node.fullname:
        return None
    if isinstance(node, nodes.Var) and node.info:
        return member_key(node.info, node.name)
    if isinstance(node, nodes.FuncBase) and node.info:
        return member_key(node.info, node.name)
    module, name = node.fullname.rsplit(".", 1)
    return module, name


def member_key(info: nodes.TypeInfo, name: str) -> Key:
    """The key of a member of a class."""
    return info.module_name, f"{info.fullname.removeprefix(info.module_name + '.')}.{name}"


class _Definitions(ast.NodeVisitor):
    """Where classes, functions, parameters and fields are defined, by Python's own parser."""

    def __init__(self, index: Index, path: str, module: str) -> None:
        self._index, self._path, self._module = index, path, module
        self._lines = (index._root / path).read_bytes().split(b"\n")
        self._outer: list[str] = []
        self._in_function = 0

    def _add(self, name: str, line: int, column: int) -> None:
        key = (self._module, ".".join([*self._outer, name]))
        self._index.places[key].add((self._path, line, column))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node, b"class")
        slots = [s for s in node.body if isinstance(s, ast.Assign)]
        self._outer.append(node.name)
        for statement in slots:
            if any(isinstance(t, ast.Name) and t.id == "__slots__" for t in statement.targets):
                for part in ast.walk(statement.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        self._add(part.value, part.lineno, part.col_offset + 1)
        self.generic_visit(node)
        self._outer.pop()

    def _define(
        self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, keyword: bytes
    ) -> None:
        line = self._lines[node.lineno - 1]
        begin = line.index(keyword, node.col_offset) + len(keyword)
        column = line.index(node.name.encode(), begin)
        if not self._in_function:
            self._add(node.name, node.lineno, column)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._define(node, b"def")
        self._outer.append(node.name)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [a for a in (node.args.vararg, node.args.kwarg) if a]
        for argument in every:
            if not self._in_function:
                self._add(argument.arg, argument.lineno, argument.col_offset)
            key = (self._path, argument.arg)
            self._index.locals[key].add((self._path, argument.lineno, argument.col_offset))
        self._in_function += 1
        self.generic_visit(node)
        self._in_function -= 1
        self._outer.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in every:
            key = (self._path, argument.arg)
            self._index.locals[key].add((self._path, argument.lineno, argument.col_offset))
        self._in_function += 1
        self.generic_visit(node)
        self._in_function -= 1

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store) and not self._in_function:
            self._add(node.id, node.lineno, node.col_offset)


class _References(ast.NodeVisitor):
    """References in one file: Python's parser says where names are, mypy of what type."""

    def __init__(
        self,
        index: Index,
        path: str,
        tree: nodes.MypyFile,
        result: build.BuildResult,
    ) -> None:
        self._index, self._path, self._tree = index, path, tree
        self._types, self._files = result.types, result.files
        self._classes: list[nodes.TypeInfo | None] = []
        self._functions: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda] = []
        self._bound: list[set[str]] = []
        self._imported: list[dict[str, Key | None]] = []
        """For each function around: names that it imports itself."""
        self._class_names: list[set[str]] = []
        self._exprs: defaultdict[Span, list[nodes.Expression]] = defaultdict(list)
        for node in walk(tree):
            if isinstance(node, nodes.Expression) and node.end_line and node.end_column:
                self._exprs[node.line, node.column, node.end_line, node.end_column].append(node)

    def _found(self, node: ast.expr) -> list[nodes.Expression]:
        return self._exprs.get(_span(node), [])

    def _infos(self, node: ast.expr) -> list[nodes.TypeInfo]:
        """The classes that a value may be of; of a class, that class."""
        if isinstance(node, ast.Name) and self._is_self(node.id) and self._classes[-1]:
            return [self._classes[-1]]
        infos: dict[str, nodes.TypeInfo] = {}
        if isinstance(node, ast.Name) and self._imported and node.id in self._imported[-1]:
            key = self._imported[-1][node.id]
            found = self._index.infos.get(".".join(key)) if key else None
            if found is not None:
                return [found]
        for expression in self._found(node):
            if isinstance(expression, nodes.RefExpr) and isinstance(
                expression.node, nodes.TypeInfo
            ):
                infos[expression.node.fullname] = expression.node
                continue
            for info in infos_of(self._types.get(expression)):
                infos[info.fullname] = info
        return list(infos.values())

    def _is_self(self, name: str) -> bool:
        if len(self._classes) == 0 or not self._functions:
            return False
        method = next((f for f in self._functions if not isinstance(f, ast.Lambda)), None)
        if method is None or not method.args.args or self._classes[-1] is None:
            return False
        words = {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
        return "staticmethod" not in words and method.args.args[0].arg == name

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in [*node.decorator_list, *node.bases, *(k.value for k in node.keywords)]:
            self.visit(part)
        outer = self._classes[-1] if self._classes and not self._functions else None
        symbol = (outer.names if outer else self._tree.names).get(node.name)
        info = symbol.node if symbol and not self._functions else None
        self._classes.append(info if isinstance(info, nodes.TypeInfo) else None)
        functions, self._functions = self._functions, []
        self._class_names.append(bound_names(node))
        for statement in node.body:
            self.visit(statement)
        self._class_names.pop()
        self._functions = functions
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a]
        outside: list[ast.expr | None] = [a.annotation for a in arguments]
        outside += [*node.args.defaults, *node.args.kw_defaults]
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, node.returns]
        for part in outside:
            if part is not None:
                self.visit(part)
        self._functions.append(node)
        self._bound.append(bound_names(node))
        self._imported.append(self._imports_in(node))
        hidden, self._class_names = self._class_names, []
        for statement in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(statement)
        self._class_names = hidden
        self._imported.pop()
        self._bound.pop()
        self._functions.pop()

    def _imports_in(self, function: ast.AST) -> dict[str, Key | None]:
        found: dict[str, Key | None] = {}
        for node in own_nodes(function):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            source = self._files.get(node.module)
            for alias in node.names:
                symbol = None if source is None else source.names.get(alias.name)
                if symbol is not None and alias.asname in (None, alias.name):
                    found[alias.name] = key_of(symbol.node)
        return found

    def visit_Name(self, node: ast.Name) -> None:
        if self._class_names and node.id in self._class_names[-1]:
            return
        if any(node.id in bound for bound in self._bound):
            inner = max(i for i, bound in enumerate(self._bound) if node.id in bound)
            if node.id in self._imported[inner]:
                self._put(self._imported[inner][node.id], node.lineno, node.col_offset)
                return
            place = (self._path, node.lineno, node.col_offset)
            self._index.locals[self._path, node.id].add(place)
            first = self._functions[0]
            mine = next(i for i, bound in enumerate(self._bound) if node.id in bound)
            if mine == inner == 0 and not isinstance(first, ast.Lambda):
                arguments = [*first.args.posonlyargs, *first.args.args, *first.args.kwonlyargs]
                if any(argument.arg == node.id for argument in arguments):
                    self._put(self._parameter(first.name, node.id), node.lineno, node.col_offset)
            return
        self._global(node.id, node.lineno, node.col_offset)

    def _parameter(self, function: str, name: str) -> Key:
        info = self._classes[-1] if self._classes else None
        if info is not None:
            module, outer = member_key(info, function)
            return module, f"{outer}.{name}"
        return self._tree.fullname, f"{function}.{name}"

    def _global(self, name: str, line: int, column: int) -> None:
        symbol = self._tree.names.get(name)
        if symbol is not None:
            self._put(key_of(symbol.node), line, column)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Annotations in quotes that are one name."""
        if isinstance(node.value, str) and node.value.isidentifier():
            symbol = self._tree.names.get(node.value)
            if symbol is not None and isinstance(symbol.node, nodes.TypeInfo):
                self._global(node.value, node.lineno, node.col_offset + 1)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    self._global(part.value, part.lineno, part.col_offset + 1)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        self.generic_visit(node)
        for name, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            column = pattern.col_offset - len(f"{name}=".encode())
            for info in self._infos(node.cls):
                self._members(info.mro, name, pattern.lineno, column)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        self._member(node.value, node.attr, line, end - len(node.attr.encode()))

    def _member(self, base: ast.expr, name: str, line: int, column: int) -> None:
        for expression in self._found(base):
            if isinstance(expression, nodes.RefExpr) and isinstance(
                expression.node, nodes.MypyFile
            ):
                symbol = expression.node.names.get(name)
                self._put(key_of(symbol.node) if symbol else None, line, column)
                return
        if isinstance(base, ast.Name) and not any(base.id in bound for bound in self._bound):
            symbol = self._tree.names.get(base.id)
            if symbol is not None and isinstance(symbol.node, nodes.MypyFile):
                inner = symbol.node.names.get(name)
                self._put(key_of(inner.node) if inner else None, line, column)
                return
            if symbol is not None and isinstance(symbol.node, nodes.TypeInfo):
                self._members(symbol.node.mro, name, line, column)
                return
        is_super = (
            isinstance(base, ast.Call)
            and isinstance(base.func, ast.Name)
            and base.func.id == "super"
        )
        if is_super:
            if self._classes and self._classes[-1] is not None:
                self._members(self._classes[-1].mro[1:], name, line, column)
            return
        if self._is_foreign(base):
            return
        infos = self._infos(base)
        if not infos:
            self._index.untyped[name].add((self._path, line, column))
        for info in infos:
            self._members(info.mro, name, line, column)

    def _is_foreign(self, base: ast.expr) -> bool:
        """Whether a value comes from a package whose types are not looked at, as `pytest.mark`."""
        while isinstance(base, ast.Attribute | ast.Call | ast.Subscript):
            base = base.func if isinstance(base, ast.Call) else base.value
        symbol = self._tree.names.get(base.id) if isinstance(base, ast.Name) else None
        node = None if symbol is None else symbol.node
        return isinstance(node, nodes.Var) and node.is_suppressed_import

    def _members(self, mro: Iterable[nodes.TypeInfo], name: str, line: int, column: int) -> None:
        for info in mro:
            if name in info.names:
                self._put(member_key(info, name), line, column)
                return

    def _put(self, key: Key | None, line: int, column: int) -> None:
        if key is not None:
            self._index.places[key].add((self._path, line, column))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self._named_by_string(node)
        keywords = [k for k in node.keywords if k.arg is not None]
        if not keywords:
            return
        owners = list(self._owners(node))
        for keyword in keywords:
            assert keyword.arg is not None
            for owner in owners:
                key = _keyword_key(owner, keyword.arg)
                self._put(key, keyword.lineno, keyword.col_offset)
            passed_on = any(isinstance(o, nodes.FuncItem) and _takes_any(o) for o in owners)
            if not owners or passed_on:
                place = (self._path, keyword.lineno, keyword.col_offset)
                self._index.untyped[keyword.arg].add(place)

    def _owners(self, node: ast.Call) -> Iterator[nodes.TypeInfo | nodes.FuncItem]:
        """What is called: a class, or a function."""
        callee = node.func
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        # `builds` is hypothesis's.
        if name in ("replace", "builds", "partial") and node.args:
            found_first = self._infos(node.args[0])
            yield from found_first
            if found_first:
                return
        if name == "_replace" and isinstance(callee, ast.Attribute):
            yield from self._infos(callee.value)
            return
        for expression in self._found(callee):
            found = expression.node if isinstance(expression, nodes.RefExpr) else None
            if isinstance(found, nodes.Decorator):
                found = found.func
            if isinstance(found, nodes.TypeInfo | nodes.FuncItem):
                yield found
                continue
            yield from _called(self._types.get(expression))

    def _dotted(self, node: ast.Constant) -> None:
        """`monkeypatch.setattr("package.module.name", ...)`."""
        if not isinstance(node.value, str):
            return
        module, names = _split(node.value, self._files)
        column = node.col_offset + 1 + len(module) + 1
        table: nodes.SymbolTable | None = self._files[module].names if module else None
        for name in names:
            symbol = None if table is None else table.get(name)
            if symbol is None:
                return
            self._put(key_of(symbol.node), node.lineno, column)
            column += len(name) + 1
            table = symbol.node.names if isinstance(symbol.node, nodes.TypeInfo) else None

    def _named_by_string(self, node: ast.Call) -> None:
        """`getattr(x, "name")`, `monkeypatch.setattr(x, "name", ...)` and their like."""
        callee = node.func
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        first = node.args[0] if node.args else None
        if name in ("setattr", "patch") and isinstance(first, ast.Constant):
            self._dotted(first)
            return
        if name not in NAMED_BY_STRINGS or len(node.args) < 2:
            return
        second = node.args[1]
        if isinstance(second, ast.Constant) and isinstance(second.value, str):
            self._member(node.args[0], second.value, second.lineno, second.col_offset + 1)


def _split(name: str, files: dict[str, nodes.MypyFile]) -> tuple[str, list[str]]:
    """The module at the beginning of a dotted name, and the names behind it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:count]) in files:
            return ".".join(parts[:count]), parts[count:]
    return "", []


def _takes_any(function: nodes.FuncItem) -> bool:
    return any(kind == nodes.ARG_STAR2 for kind in function.arg_kinds)


def _called(found: types.Type | None) -> Iterator[nodes.TypeInfo | nodes.FuncItem]:
    proper = types.get_proper_type(found)
    items: list[types.Type | None] = [proper]
    if isinstance(proper, types.Overloaded | types.UnionType):
        items = [*proper.items]
    for item in items:
        part = types.get_proper_type(item)
        if isinstance(part, types.CallableType):
            definition = part.definition
            if isinstance(definition, nodes.Decorator):
                definition = definition.func
            if part.is_type_obj():
                yield part.type_object()
            elif isinstance(definition, nodes.FuncItem):
                yield definition
        elif isinstance(part, types.TypeType):
            yield from infos_of(part.item)
        elif isinstance(part, types.Instance):
            symbol = part.type.get("__call__")
            called = symbol.node if symbol is not None else None
            if isinstance(called, nodes.FuncDef):
                yield called


def walk(tree: nodes.MypyFile) -> Iterator[nodes.Node]:
    """All nodes below a file: mypy's visitors cannot be extended where mypy is compiled."""
    waiting: list[object] = list(tree.defs)
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list | tuple):
            waiting += node
            continue
        if not isinstance(node, nodes.Node) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        kind = type(node)
        if kind not in _CHILDREN:
            names = [n for n in dir(kind) if not n.startswith("__") and n not in _BACK]
            is_data = {n: not callable(getattr(kind, n)) for n in names}
            _CHILDREN[kind] = [n for n in names if is_data[n]]
        for name in _CHILDREN[kind]:
            try:
                waiting.append(getattr(node, name))
            except (AttributeError, AssertionError, RuntimeError):
                continue


_BACK: Final = frozenset(("node", "info", "def_var", "original_def", "defn", "alias_node", "mro"))
"""Attributes of mypy's nodes that lead to other definitions."""
_CHILDREN: dict[type, list[str]] = {}


def _span(node: ast.expr) -> Span:
    end_line, end_column = node.end_lineno, node.end_col_offset
    return (node.lineno, node.col_offset, end_line or -1, end_column if end_column else -1)


def _keyword_key(owner: nodes.TypeInfo | nodes.FuncItem, name: str) -> Key | None:
    if isinstance(owner, nodes.FuncItem):
        return parameter_key(owner, name)
    if owner.typeddict_type is not None:
        return member_key(owner, name) if name in owner.typeddict_type.items else None
    constructor = owner.get("__init__")
    node = None if constructor is None else constructor.node
    if isinstance(node, nodes.Decorator):
        node = node.func
    generated = "dataclass" in owner.metadata or owner.is_named_tuple
    if not generated and isinstance(node, nodes.FuncDef) and node.info:
        defined = _argument(node, name)
        # The constructors in generated stubs have the fields' names.
        stub = name in owner.names and owner.module_name.endswith("_pb2")
        if stub and defined:
            return member_key(owner, name)
        return parameter_key(node, name)
    for info in owner.mro:
        if name in info.names:
            return member_key(info, name)
    return None


def _argument(node: nodes.FuncItem, name: str) -> bool:
    return any(argument.variable.name == name for argument in node.arguments)


def parameter_key(function: nodes.FuncItem, name: str) -> Key | None:
    """The key of a parameter of a function or a method."""
    if not isinstance(function, nodes.FuncDef) or not _argument(function, name):
        return None
    if function.info:
        module, outer = member_key(function.info, function.name)
        return module, f"{outer}.{name}"
    if "." not in function.fullname:
        return None
    module, outer = function.fullname.rsplit(".", 1)
    return module, f"{outer}.{name}"


def infos_of(found: types.Type | None) -> Iterator[nodes.TypeInfo]:
    """The classes that a value of a type may be of."""
    proper = types.get_proper_type(found)
    match proper:
        case types.Instance():
            yield proper.type
        case types.TupleType():
            yield proper.partial_fallback.type
        case types.UnionType():
            for item in proper.items:
                yield from infos_of(item)
        case types.TypeVarType():
            yield from infos_of(proper.upper_bound)
        case types.TypeType():
            yield from infos_of(proper.item)
        case types.CallableType() if proper.is_type_obj():
            yield proper.type_object()
        case types.CallableType() | types.Overloaded():
            yield proper.fallback.type
        case types.LiteralType():
            yield proper.fallback.type


class _Groups:
    """Members that share a name: union over overriding, and over protocols and their classes."""

    def __init__(self, infos: dict[str, nodes.TypeInfo]) -> None:
        self._infos = infos
        self._parent: dict[Key, Key] = {}
        self._all: defaultdict[Key, set[Key]] = defaultdict(set)
        for info in infos.values():
            for name in info.names:
                for base in info.mro[1:]:
                    if name in base.names:
                        self._join(member_key(info, name), member_key(base, name))
        attempted = type_state._attempted_protocols
        for fullname, protocols in attempted.items():
            info_or_none = infos.get(fullname)
            if info_or_none is None:
                continue
            for protocol in protocols:
                found = infos.get(protocol)
                if found is not None and found.is_protocol:
                    self._link(info_or_none, found)
        for key in list(self._parent):
            self._all[self._find(key)].add(key)

    def _link(self, info: nodes.TypeInfo, protocol: nodes.TypeInfo) -> None:
        wanted = [name for name in protocol.protocol_members if not name.startswith("__")]
        if not all(info.get(name) for name in wanted):
            return
        for name in wanted:
            mine = next(base for base in info.mro if name in base.names)
            theirs = next((b for b in protocol.mro if name in b.names), protocol)
            self._join(member_key(mine, name), member_key(theirs, name))

    def _find(self, key: Key) -> Key:
        while (parent := self._parent.get(key, key)) != key:
            key = parent
        return key

    def _join(self, one: Key, other: Key) -> None:
        self._parent.setdefault(one, one)
        self._parent.setdefault(other, other)
        self._parent[self._find(one)] = self._find(other)

    def of(self, key: Key) -> set[Key]:
        return self._all.get(self._find(key), {key}) | {key}


def module_of(path: str) -> str:
    """The module at a path, by the name that mypy knows it by."""
    return dotted(path)
