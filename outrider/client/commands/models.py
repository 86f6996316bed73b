"""`outrider models`: pulls a model into the user's cache, or lists the known models."""

from __future__ import annotations

import argparse
import json
import sys

from outrider.models import builtin_head, is_pulled, list_models, resolve_model, resolve_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    commands = parser.add_subparsers(dest="models_command", metavar="COMMAND", required=True)
    pull = commands.add_parser(
        "pull", help="Download a model and convert it if it is not in the cache."
    )
    pull.add_argument(
        "model",
        metavar="NAME|DIR|FILE.gguf|HUB-ID",
        help="Known name, directory, GGUF file, or OWNER/NAME on the Hugging Face hub.",
    )
    pull.add_argument(
        "--tokenizer-only",
        action="store_true",
        help="Leave out the weights. A router needs only the tokenizer, and no torch is needed.",
    )
    listing = commands.add_parser("list", help="List the known models.")
    listing.add_argument(
        "--json", action="store_true", help="Print one JSON object for each model."
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OutriderError."""
    if args.models_command == "pull":
        resolve = resolve_tokenizer if args.tokenizer_only else resolve_model
        sys.stdout.write(f"{resolve(args.model)}\n")
        return 0
    for entry in list_models():
        facts = {
            "name": entry.name,
            "title": entry.title,
            "size_mb": round(entry.size_bytes / 1e6),
            "licence": entry.licence,
            "pulled": is_pulled(entry.name),
            "head": builtin_head(entry.name) is not None,
        }
        if args.json:
            sys.stdout.write(json.dumps(facts) + "\n")
        else:
            state = "pulled" if facts["pulled"] else "not pulled"
            head = "with a draft head" if facts["head"] else "without a draft head"
            sys.stdout.write(
                f"{entry.name}  {entry.title}, {facts['size_mb']} MB, {entry.licence}, "
                f"{state}, {head}\n"
            )
    return 0
