"""Writes docs/decisions/README.md, the index of decision records by area.

python tools/decisions.py > docs/decisions/README.md

A record begins with two lines, with an empty line between them:

    # NUMBER. TITLE
    Status: in force. Area: AREA.

In place of "in force" a record may be "merged into [decision N](FILE)", "superseded by [decision
N](FILE)" or "withdrawn"; it has no area then.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
_TITLE = re.compile(r"# (\d+)\. (.+)")
_STATUS = re.compile(r"Status: (in force|merged into|superseded by|withdrawn)\b")
_AREA = re.compile(r"Status: in force\. Area: ([^.]+)\.")


@dataclass(frozen=True)
class Record:
    """One decision record."""

    path: Path
    number: int
    title: str
    status: str
    """The whole line after "Status: "."""
    area: str | None
    """None unless the decision is in force."""

    @classmethod
    def read(cls, path: Path) -> Record:
        """Parse a record's first lines. ValueError if title, status or area are missing."""
        title_line, _, status_line = path.read_text().splitlines()[:3]
        title, status = _TITLE.fullmatch(title_line), _STATUS.match(status_line)
        if title is None or status is None:
            raise ValueError(f"{path.name}: its first lines are no title and status")
        area = _AREA.match(status_line)
        if area is None and status[1] == "in force":
            raise ValueError(f"{path.name}: no area")
        return cls(
            path,
            int(title[1]),
            title[2],
            status_line.removeprefix("Status: "),
            None if area is None else area[1],
        )


def records() -> list[Record]:
    """All records by number."""
    return [Record.read(path) for path in sorted(FOLDER.glob("[0-9]*.md"))]


def page() -> str:
    """The index, in Markdown."""
    found = records()
    lines = [
        "# Decisions",
        "",
        "<!-- Written by tools/decisions.py (`make generated`) from the records' first lines. -->",
        "",
        "Why Outrider is built as it is: for each decision its context, its consequences, and the",
        "alternatives that were rejected. Numbers are stable, because comments cite them. Renamed",
        "modules and settings are listed in [old and new names](names/README.md).",
    ]
    for area in sorted(
        {record.area for record in found if record.area is not None}, key=str.casefold
    ):
        lines += ["", f"## {area[0].upper()}{area[1:]}", ""]
        lines += [
            f"* [{record.number}. {record.title}]({record.path.name})"
            for record in found
            if record.area == area
        ]
    lines += ["", "## Not in force", ""]
    for record in found:
        if record.area is None:
            fate = record.status.partition(". ")[0]
            lines.append(f"* [{record.number}. {record.title}]({record.path.name}): {fate}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
