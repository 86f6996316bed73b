"""Writes docs/decisions/README.md, the list of decision records.

python tools/decisions.py > docs/decisions/README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"


def page() -> str:
    """The list, in Markdown."""
    lines = [
        "# Decisions",
        "",
        "<!-- Written by tools/decisions.py (`make generated`) from the records' first lines. -->",
        "",
        "What was decided and why, and what was tried and lost. Newest last.",
        "",
    ]
    for record in sorted(FOLDER.glob("[0-9]*.md")):
        title = record.read_text().splitlines()[0].removeprefix("# ")
        lines.append(f"* [{title}]({record.name})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
