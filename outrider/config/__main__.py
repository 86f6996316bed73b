"""`outrider config`: prints schemas, the reference page and effective values, and checks files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from outrider.config.display import as_json, as_toml
from outrider.config.loader import load_config, parse_config
from outrider.config.process_registry import PROCESSES
from outrider.config.reference import flags_of, render_page, render_section
from outrider.config.schema import json_schema
from outrider.errors import OutriderError

_EXIT_MISUSE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, or 2 for an invalid configuration."""
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except OutriderError as error:
        sys.stderr.write(f"outrider: {error.message}\n")
        return _EXIT_MISUSE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `outrider config`."""
    parser = argparse.ArgumentParser(
        prog="outrider config", description="Show, check and describe configurations."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    schema = commands.add_parser(
        "schema", help="Print the JSON Schema of a process's configuration file."
    )
    schema.add_argument("process", choices=PROCESSES, help="Process that reads the file.")
    commands.add_parser("reference", help="Print the reference page of all keys as Markdown.")
    check = commands.add_parser("check", help="Check a configuration file.")
    check.add_argument("file", metavar="FILE.toml", help="File to check.")
    check.add_argument(
        "--process", choices=PROCESSES, required=True, help="Process that reads the file."
    )
    show = commands.add_parser("show", help="Print the effective values and their sources.")
    show.add_argument(
        "--process", choices=PROCESSES, required=True, help="Process whose values are printed."
    )
    show.add_argument("--config", metavar="FILE.toml", help="TOML configuration file.")
    show.add_argument("--json", action="store_true", help="Print one JSON object instead of text.")
    show.add_argument(
        "flags", nargs="*", metavar="-- FLAG", help="Flags of the process, after two dashes."
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "reference":
        sys.stdout.write(_reference())
        return 0
    process = PROCESSES[args.process]
    if args.command == "schema":
        schema = json_schema(process.table, f"Configuration: {process.title.lower()}")
        sys.stdout.write(json.dumps(schema, indent=2) + "\n")
    elif args.command == "check":
        load_config(process.config, args.file)
        sys.stdout.write(f"{args.file}: a configuration of the {process.title.lower()}\n")
    else:
        file = [] if args.config is None else ["--config", args.config]
        loaded = parse_config(process.config, process.parser, [*file, *args.flags], process.role)
        sys.stdout.write(as_json(loaded) if args.json else as_toml(loaded))
    return 0


def _reference() -> str:
    return render_page(
        render_section(process.title, process.table, flags_of(process.parser))
        for process in PROCESSES.values()
    )


if __name__ == "__main__":
    sys.exit(main())
