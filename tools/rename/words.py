"""Replaces words of prose: docstrings, comments, help texts, log messages, Markdown pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Sequence
from pathlib import Path

from tools.rename.moves import SKIPPED
from tools.rename.tables import GENERATED, WordRow, tracked

LOGGED = ("debug", "info", "warning", "error", "exception", "critical")
SPOKEN = ("help", "description", "title", "text")


def replace_words(root: Path, rows: Sequence[WordRow], only: str) -> list[str]:
    """Replace in all files whose paths begin with `only`; returns how often each row was used."""
    patterns = [(row, re.compile(rf"(?<![\w`/.-]){row.old}(?![\w`(-])")) for row in rows]
    used = dict.fromkeys((row.old for row in rows), 0)
    for path in tracked(root, "*.py", "*.md", "*.proto"):
        if not path.startswith(only or "") or path.startswith(SKIPPED) or GENERATED in path:
            continue
        if path.startswith("docs/decisions/"):
            continue
        rows_here = [(r, p) for r, p in patterns if not r.where or path.startswith(r.where)]
        text = (root / path).read_text()
        spans = _prose(path, text)
        new = text
        for begin, end in sorted(spans, reverse=True):
            part = text[begin:end]
            for row, pattern in rows_here:
                part, count = pattern.subn(_keeping_case(row.new), part)
                used[row.old] += count
            new = new[:begin] + part + new[end:]
        if new != text:
            (root / path).write_text(new)
    return [f"{count:5} x {old}" for old, count in used.items()]


def _keeping_case(new: str):  # type: ignore[no-untyped-def]
    def replace(match: re.Match[str]) -> str:
        text = match.expand(new)
        return text[0].upper() + text[1:] if match[0][0].isupper() else text

    return replace


def _prose(path: str, text: str) -> list[tuple[int, int]]:
    """Where prose is, by offsets."""
    if path.endswith(".py"):
        return _python_prose(text)
    if path.endswith(".proto"):
        return [match.span() for match in re.finditer(r"//[^\n]*", text)]
    spans, at = [], 0
    for number, part in enumerate(re.split(r"(?m)^```", text)):
        if number % 2 == 0:
            spans.append((at, at + len(part)))
        at += len(part) + 3
    return spans


def _python_prose(text: str) -> list[tuple[int, int]]:
    starts = [0]
    for row in text.split("\n"):
        starts.append(starts[-1] + len(row) + 1)
    lines = text.split("\n")

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode(errors="ignore"))

    spans = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            begin = starts[token.start[0] - 1] + token.start[1]
            spans.append((begin, begin + len(token.string)))
    for node in ast.walk(ast.parse(text)):
        for found in _spoken(node):
            begin = offset(found.lineno, found.col_offset)
            spans.append((begin, offset(found.end_lineno or 1, found.end_col_offset or 0)))
    return spans


def _spoken(node: ast.AST) -> list[ast.Constant]:
    """String literals that somebody reads: docstrings, help texts, messages of logs."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Expr):
        found = [node.value]
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in LOGGED:
            found = node.args[:1]
        found += [keyword.value for keyword in node.keywords if keyword.arg in SPOKEN]
    return [f for f in found if isinstance(f, ast.Constant) and isinstance(f.value, str)]
