"""Docstrings stand alone: none runs into the next one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "outrider",
    "drafter/outrider_drafter",
    "verifier/outrider_verifier",
    "router/outrider_router",
    "deploy/ray/outrider_ray",
    "benchmarks/outrider_bench",
)
GENERATED = "outrider/wire/v1"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, those of attributes and constants included."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_ends_within_a_sentence(package: str) -> None:
    open_ended = [
        f"{path.relative_to(ROOT)}:{line}: ...{text[-40:]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if GENERATED not in str(path)
        for line, text in docstrings(path)
        if text.endswith((",", ";")) or text == ""
    ]
    assert not open_ended
