"""Command line of the renames: `python -m tools.rename.apply COMMAND`; see README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.rename.check import check_tables
from tools.rename.moves import move_modules
from tools.rename.symbols import rename_symbols
from tools.rename.tables import read_modules, read_symbols, read_words
from tools.rename.words import replace_words


def main() -> int:
    """Run a command; the exit status: 1 where the tables clash or something was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="checkout to work on")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="look for clashes in the tables")
    moves = commands.add_parser("moves", help="move modules")
    moves.add_argument("--only", default="", help="old paths that begin so")
    moves.add_argument("--merge", action="store_true", help="merge those that are marked, too")
    symbols = commands.add_parser("symbols", help="rename symbols")
    symbols.add_argument("--only", default="", help="old paths of modules that begin so")
    symbols.add_argument(
        "--word", default="", help="rows with one of these reasons, separated by semicolons"
    )
    symbols.add_argument("--kind", default="", help="rows of this kind")
    words = commands.add_parser("words", help="replace words of prose")
    words.add_argument("--only", default="", help="files whose paths begin so")
    args = parser.parse_args()
    root = args.root.resolve()
    if args.command == "check":
        return report(check_tables(root))
    if args.command == "moves":
        rows = [row for row in read_modules(root) if row.old.startswith(args.only)]
        return report(move_modules(root, rows, merge=args.merge), fail=False)
    if args.command == "symbols":
        chosen = [
            row
            for row in read_symbols(root)
            if row.module.startswith(args.only)
            and (not args.word or row.word in args.word.split(";"))
            and args.kind in ("", row.kind)
        ]
        return report(rename_symbols(root, chosen), fail=False)
    return report(replace_words(root, read_words(root), args.only), fail=False)


def report(notes: list[str], *, fail: bool = True) -> int:
    """Print what needs a look; the exit status."""
    for note in notes:
        print(note)
    print(f"{len(notes)} notes", file=sys.stderr)
    return int(fail and bool(notes))


if __name__ == "__main__":
    sys.exit(main())
