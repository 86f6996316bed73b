"""The setting `hooks`: its syntax, the import of hook modules, their options, and its errors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from outrider.config.hooks import HookSpec, check_hooks, install_hooks, parse_hook
from outrider.errors import InvalidRequestError

WELL_BEHAVED = """
from __future__ import annotations

def install(hooks, *, ms: float, rows: int = 1, on: bool = False, name: str = "-", bare="b"):
    hooks.seen.append((ms, rows, on, name, bare))
"""
Written = Callable[[str], str]


@dataclass(slots=True)
class Points:
    """Hook points of a test."""

    seen: list[object] = field(default_factory=list)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writes a module of this text; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    numbers = itertools.count()
    names: list[str] = []

    def write(text: str) -> str:
        name = f"hook_of_a_test_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_a_hook_is_a_module_and_its_options() -> None:
    assert parse_hook("a.b_c") == HookSpec("a.b_c", {})
    assert parse_hook("a:x=1,y=") == HookSpec("a", {"x": "1", "y": ""})
    assert parse_hook("a:x=b:c=d") == HookSpec("a", {"x": "b:c=d"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no name of a module"),
        ("a-b", "must be MODULE or MODULE:KEY=VALUE,KEY=VALUE"),
        ("a..b", "no name of a module"),
        ("a:", "no KEY=VALUE"),
        ("a:x", "'x' is no KEY=VALUE"),
        ("a:=1", "no KEY=VALUE"),
        ("a:x=1,", "no KEY=VALUE"),
        ("a:x=1,x=2", "gives x twice"),
    ],
)
def test_a_text_of_another_form_is_refused(text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        check_hooks(["fine", text])
    assert caught.value.reason == "INVALID_HOOK"


def test_modules_are_installed_in_order_with_options_of_their_types(written: Written) -> None:
    module, points = written(WELL_BEHAVED), Points()
    settings = [f"{module}:ms=1.5,rows=2,on=true,name=x y,bare=1", f"{module}:ms=3,on=0"]
    assert install_hooks(settings, points) is points
    assert points.seen == [(1.5, 2, True, "x y", "1"), (3.0, 1, False, "-", "b")]
    assert install_hooks([], Points()).seen == []


def test_annotations_may_be_types_too(written: Written) -> None:
    module = written("def install(hooks, *, ms: float):\n    hooks.seen.append(ms)\n")
    assert install_hooks([f"{module}:ms=2"], Points()).seen == [2.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "the option ms must be given"),
        (":ms=1,speed=2", r"unknown option speed \(known: bare, ms, name, on, rows\)"),
        (":ms=soon", "ms must be a finite number, got 'soon'"),
        (":ms=nan", "ms must be a finite number"),
        (":ms=inf", "ms must be a finite number"),
        (":ms=1,rows=1.5", "rows must be an integer, got '1.5'"),
        (":ms=1,on=maybe", "on must be true or false, got 'maybe'"),
    ],
)
def test_bad_options_are_named(written: Written, options: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        install_hooks([written(WELL_BEHAVED) + options], Points())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"must have a function install\(hooks, \*\*options\)"),
        ("install = 3", "must have a function install"),
        ("def install(", "cannot be imported: SyntaxError"),
        ("import no_such_module_at_all", "there is no module no_such_module_at_all"),
        ("def install(hooks):\n    hooks.other = 1", "could not be installed in Points: Attrib"),
        ("def install(hooks):\n    raise ValueError('too hot')", "ValueError: too hot"),
        ("def install(hooks, *, ms: list[int]):\n    pass", "one of str, int, float, bool"),
    ],
)
def test_a_module_that_is_no_hook_is_refused(written: Written, text: str, says: str) -> None:
    setting = written(text) + (":ms=1" if "ms" in text else "")
    with pytest.raises(InvalidRequestError, match=says) as caught:
        install_hooks([setting], Points())
    assert caught.value.reason == "INVALID_HOOK"


@pytest.mark.parametrize("module", ["no_such_module", "outrider.no_such_module"])
def test_a_missing_module_is_named(module: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"there is no module {module}.*PYTHONPATH"):
        install_hooks([module], Points())
