"""Names of modules, classes, functions, settings and metrics are those of the field, and a class
name means one thing in the whole repository."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = sorted(
    path
    for folder in ("outrider", "verifier", "drafter", "router", "deploy/ray", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "/v1/" not in str(path)
)
OLD_WORDS: Final = frozenset(
    [
        "law",
        "laws",
        "coin",
        "coins",
        "told",
        "settled",
        "sheet",
        "alike",
        "judged",
        "lane",
        "lanes",
        "halves",
        "flying",
        "own",
        "awake",
        "patience",
        "suspect",
        "paused",
        "lean",
        "piece",
        "pieces",
        "stretch",
        "form",
        "forms",
        "legal",
        "guide",
        "warp",
        "warper",
        "warped",
        "seat",
        "seats",
        "place",
        "places",
        "room",
        "let",
        "way",
        "ways",
        "contest",
        "known",
        "pace",
        "course",
        "guest",
        "party",
        "ticket",
        "endings",
        "twin",
        "ill",
        "nemesis",
        "most",
        "least",
        "keeping",
        "kept",
        "placed",
        "glances",
        "holds",
        "handover",
    ]
)
"""Words that the project once used for things that the field has other names for."""
OLD_PHRASES: Final = re.compile(
    r"(^|_)(own_drafts?|own_head|stand_ins?|straight_on|swap_lane)(_|$)"
)
METRIC: Final = r"outrider_[a-z_]+"
ALLOWED_PHRASES: Final = re.compile("at_least|at_most|in_place|has_room")
"""Plain English in which an old word has another sense: bounds, updates without a copy, and whether
a container takes more."""
NAMES_FROM_OUTSIDE: Final = frozenset(
    [
        "nohup",
        "add_XServicer_to_server",
        "speculators",
        "all_commit",
        "all_device",
        "name_triton",
        "name_torch",
    ]
)
"""Names in docstrings that are of other programs, or made at run time."""
OTHER_TEXTS: Final = ("*.toml", "*.proto", "*.yaml", "*.json", "Makefile")
ALLOWED_CLASSES: Final[dict[str, str]] = {}
"""Class names that may stand in two modules, with the reason."""


def words_of(name: str) -> list[str]:
    """The words of a name in snake case or camel case, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def names_of(path: Path) -> Iterator[tuple[str, str]]:
    """Kind and name of a module, and of its classes, functions and settings."""
    yield "module", path.stem if path.stem != "__init__" else path.parent.name
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name
            if node.name.endswith("Config") or node.name.endswith("Defaults"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield "setting", field.target.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name
        elif isinstance(node, ast.Constant) and re.fullmatch(METRIC, str(node.value)):
            yield "metric", str(node.value)


def old_words_in(name: str) -> list[str]:
    """The old words of a name."""
    snake = ALLOWED_PHRASES.sub("", "_".join(words_of(name)))
    found = [word for word in snake.split("_") if word in OLD_WORDS]
    return found + [match[2] for match in OLD_PHRASES.finditer(snake)]


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 500


@pytest.mark.parametrize(
    ("name", "expected"),
    [("DraftLaw", ["law"]), ("awake_cores", ["awake"]), ("KVHeadroom", []), ("InPlaceCopy", [])],
)
def test_words_are_found_in_any_case(name: str, expected: list[str]) -> None:
    assert old_words_in(name) == expected


def test_no_name_uses_a_word_that_the_field_does_not() -> None:
    found = sorted(
        {
            f"{path.relative_to(ROOT)}: {kind} {name}"
            for path in SOURCES
            for kind, name in names_of(path)
            if old_words_in(name)
        }
    )
    assert not found, "\n".join(found)


def test_a_class_name_stands_in_one_place() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path.relative_to(ROOT)))
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in ALLOWED_CLASSES} == {}


def test_a_package_lists_its_modules() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name != "__init__.py" and (path.parent / "__init__.py").exists()
        if len(list(path.parent.glob("*.py"))) > 2
        if not re.search(
            rf"^{re.escape(path.name)}\b", (path.parent / "__init__.py").read_text(), re.MULTILINE
        )
    ]
    assert not missing


def test_a_package_has_few_modules() -> None:
    crowded = {
        str(init.parent.relative_to(ROOT)): count
        for init in SOURCES
        if init.name == "__init__.py" and (count := len(list(init.parent.glob("*.py"))) - 1) > 25
    }
    assert not crowded


def docstrings_of(tree: ast.Module) -> list[ast.Constant]:
    """The docstrings of a module, of its classes and functions, and of names under assignments."""
    return [
        statement.value
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


def identifiers_of(tree: ast.Module, docstrings: list[ast.Constant]) -> Iterator[str]:
    """All that is a name in a module, and the words of its strings, docstrings left out."""
    skipped = {id(docstring) for docstring in docstrings}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield from value.split(".")
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield from re.findall(r"\w+", node.value)


def test_what_docstrings_quote_is_there() -> None:
    known = set(dir(builtins)) | NAMES_FROM_OUTSIDE
    quoted: list[tuple[str, str]] = []
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = docstrings_of(tree)
        known |= {*identifiers_of(tree, docstrings), *path.parts, path.stem}
        for docstring in docstrings:
            for name in re.findall(r"`([A-Za-z_](?:[\w.]*\w)?)(?:\(\))?`", str(docstring.value)):
                quoted.append((f"{path.relative_to(ROOT)}:{docstring.lineno}: {name}", name))
    for folder in ("proto", "deploy", "heads", "benchmarks", "."):
        pattern = "*" if folder == "." else "**/*"
        for path in (ROOT / folder).glob(pattern):
            if any(path.match(each) for each in OTHER_TEXTS):
                known |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    stale = [where for where, name in quoted if name.split(".")[-1] not in known]
    assert not stale, "\n".join(stale)
