"""The pages that people read, and what can be tried of them: commands, links, blocks of code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}.*|\s*)\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"(?<!`)\[[^\]\n]*\]\(([^)\s]+)\)")
_SHELL = ("", "sh", "bash", "console")
_PROGRAM = re.compile(r"(?:\S*/)?(outrider(?:-\w+)?|outrider_ray)$")
_VARIABLE = re.compile(r"[A-Z_]+=")


@dataclass(frozen=True)
class Excerpt:
    """Something on a page."""

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text}"


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md, docs/ and the READMEs of processes, deployments and results."""
    patterns = (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "*/README.md",
        "deploy/**/*.md",
        "heads/*/README.md",
    )
    found = {page for pattern in patterns for page in ROOT.glob(pattern)}
    found |= set(ROOT.glob("benchmarks/results/**/*.md"))
    return sorted(page for page in found if not page.is_relative_to(ROOT / ".venv"))


def blocks(page: Path, language: str) -> Iterator[str]:
    """Fenced code of a language."""
    for name, code in _FENCE.findall(page.read_text()):
        if name == language:
            yield code


def links(page: Path) -> Iterator[str]:
    """Targets within the repository, with their anchors."""
    text = _FENCE.sub("", page.read_text())
    for target in _LINK.findall(text):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def code_lines(page: Path) -> list[str]:
    """Lines of a page's shell code, fenced or indented; continued lines are joined."""
    text = page.read_text()
    code = [body for name, body in _FENCE.findall(text) if name in _SHELL]
    code += _INDENTED.findall(_FENCE.sub("", text))
    return [line.strip() for body in code for line in re.sub(r"\\\n\s*", "", body).splitlines()]


def commands() -> list[Excerpt]:
    """Command lines of our programs: in code, and inline where they have flags.

    Decision records are left out: they tell what was.
    """
    found = []
    for page in pages():
        if page.is_relative_to(ROOT / "docs" / "decisions"):
            continue
        inline = _INLINE.findall(_FENCE.sub("", page.read_text()))
        lines = code_lines(page) + [said for said in inline if " --" in said]
        found += [Excerpt(page, line.strip()) for line in lines if words_of(line)]
    return found


def words_of(line: str) -> list[str]:
    """A command line's program and arguments, from our program on; empty if it has none."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    for index, word in enumerate(words):
        program = _PROGRAM.match(word)
        # What stands before it starts it: variables, `ray job submit ... --`, `python -m`.
        begins = not index or words[index - 1] in ("--", "-m", "time", "exec", "$")
        begins = begins or all(_VARIABLE.match(each) for each in words[:index])
        if program is not None and begins:
            return [program[1], *_arguments(words[index + 1 :])]
    return []


def _arguments(words: list[str]) -> list[str]:
    """What the program would get: nothing of the shell's, something for what is left open."""
    found: list[str] = []
    for word in words:
        if word in ("|", "&", "&&", ";", ">", "2>"):
            break
        if word == "..." and found and found[-1].startswith("--"):
            found.append("OPEN")
        elif word != "..." and not word.startswith("$"):
            found.append(word)
    return found
