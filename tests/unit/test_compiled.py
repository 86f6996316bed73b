"""What may be compiled, and what is made of it (decision 48)."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from outrider.build_info import COMPILED, has_extensions, require_one_build
from tools.compiled_wheel import PACKAGES, SOURCES, compile_modules, modules

ROOT = Path(__file__).resolve().parents[2]
NAMES = {path.removesuffix(".py").replace("/", "."): path for path in modules(ROOT)}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the packages by its name."""
    for source in map(Path, SOURCES):
        for path in sorted((ROOT / source).rglob("*.py")):
            name = (Path(source.name) / path.relative_to(ROOT / source)).with_suffix("")
            yield ".".join(name.parts), ast.parse(path.read_text())


def classes(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Classes with the modules that their bases were imported from."""
    origins = {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            yield node.name, [origins.get(b.id, "") for b in bases if isinstance(b, ast.Name)]


def test_what_is_left_as_it_is_extends_nothing_that_is_compiled() -> None:
    found = dict(sources())
    assert set(NAMES) < set(found)
    left = {name: module for name, module in found.items() if name not in NAMES}
    extends = [
        (name, which)
        for name, module in left.items()
        for which, origins in classes(module)
        if set(origins) & set(NAMES)
    ]
    assert not extends


def test_a_tuple_that_says_how_many_it_is_of_is_not_compiled() -> None:
    """mypyc takes the length of a named tuple for the number of its fields."""
    lying = [
        (name, node.name)
        for name, module in sources()
        if name in NAMES
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
        and any(isinstance(part, ast.FunctionDef) and part.name == "__len__" for part in node.body)
    ]
    assert not lying


def test_no_compiled_class_has_an_attribute_of_type_slice() -> None:
    """mypyc looks for the name of this type in the wrong module when the class is imported."""
    failing = [
        (name, node.name)
        for name, module in sources()
        if name in NAMES
        for node in ast.walk(module)
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(part, ast.AnnAssign)
            and isinstance(part.annotation, ast.Name)
            and part.annotation.id == "slice"
            for part in node.body
        )
    ]
    assert not failing


def test_all_that_is_to_be_compiled_can_be(tmp_path: Path) -> None:
    compile_modules(ROOT, tmp_path, translate_only=True)
    assert any((tmp_path / "c").rglob("*.c"))


def test_what_wheels_are_compiled_with_is_what_is_checked_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    (pinned,) = [each for each in hook["dependencies"] if each.startswith("mypy==")]
    assert pinned in project["project"]["optional-dependencies"]["dev"]


def test_a_module_that_is_gone_is_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / next(iter(PACKAGES))
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="no such modules"):
        modules(tmp_path)


def test_two_builds_are_not_mixed(tmp_path: Path) -> None:
    package = tmp_path / "__init__.py"
    package.touch()
    with pytest.raises(ImportError, match="different builds") if COMPILED else nullcontext():
        require_one_build(str(package))
    (tmp_path / "core.abi3.so").touch()
    assert has_extensions(tmp_path)
    with nullcontext() if COMPILED else pytest.raises(ImportError, match="different builds"):
        require_one_build(str(package))


def test_both_processes_look_at_it_before_anything_else() -> None:
    code = (
        "import outrider.build_info as c; c.COMPILED = not c.COMPILED\n"
        "for name in ('outrider_verifier', 'outrider_drafter'):\n"
        "    try: __import__(name)\n"
        "    except ImportError as error: assert 'different builds' in str(error)\n"
        "    else: raise SystemExit(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout
