"""`outrider keys new`: makes an API key and prints it; its hash goes into the router's file."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import secrets
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

from outrider.client.flags import integer_at_least, number_at_least
from outrider.config.toml import toml_key, toml_value
from outrider.errors import AlreadyExistsError, FailedPreconditionError, InvalidRequestError

KEY_PREFIX = "sk-outrider-"
"""Prefix of every key. Secret scanners recognise leaked keys by it."""
KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags to a parser."""
    commands = parser.add_subparsers(dest="keys_command", metavar="COMMAND", required=True)
    text = "Create an API key and print it once."
    new = commands.add_parser("new", help=text, description=text)
    add = new.add_argument
    add("name", metavar="NAME", help="Name of the key in logs and metrics.")
    add(
        "--file",
        metavar="FILE.toml",
        type=Path,
        help="Key file to which the hash of the key is added (default: the hash is printed too).",
    )
    add(
        "--tenant",
        metavar="NAME",
        help="Tenant to which requests with this key belong (default: the name of the key).",
    )
    add(
        "--requests-per-s",
        metavar="N",
        type=number_at_least(0.0),
        help="Average number of requests per second that the key may send.",
    )
    add(
        "--max-concurrent",
        metavar="N",
        type=integer_at_least(1),
        help="Largest number of requests that the key may have in progress.",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=integer_at_least(1),
        help="Largest max_tokens that a request with this key may ask for.",
    )
    add(
        "--operator",
        action="store_true",
        default=None,
        help="Allow the key to add and remove drafters and to read metrics.",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises OutriderError."""
    if not _NAME.fullmatch(args.name):
        raise InvalidRequestError(
            f"NAME must consist of 1 to 64 letters, digits, - or _, got {args.name!r}",
            reason="INVALID_FLAG",
        )
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    limits = {
        name: getattr(args, name)
        for name in ("tenant", "requests_per_s", "max_concurrent", "max_tokens", "operator")
    }
    table = format_key_table(args.name, key, limits)
    if args.file is None:
        sys.stdout.write(f"{key}\n\n{table}")
        return 0
    append_table(args.file, args.name, table)
    sys.stdout.write(f"{key}\n")
    return 0


def format_key_table(name: str, key: str, limits: dict[str, object]) -> str:
    """Return the TOML table of a key with its hash and its limits. Limits that are None are left
    out.

    Raises InvalidRequestError if TOML cannot represent a value.
    """
    values = {"sha256": hashlib.sha256(key.encode()).hexdigest(), **limits}
    lines = [f"[keys.{toml_key(name)}]\n"]
    for limit, value in values.items():
        if value is None:
            continue
        try:
            lines.append(f"{limit} = {toml_value(value)}\n")
        except ValueError as error:
            flag = limit.replace("_", "-")
            raise InvalidRequestError(f"--{flag}: {error}", reason="INVALID_FLAG") from None
    return "".join(lines)


def append_table(path: Path, name: str, table: str) -> None:
    """Append the TOML table of a key to a key file.

    Raises AlreadyExistsError if the file already has a key with this name, and
    FailedPreconditionError (BAD_FILE) if no table can be appended to the file.
    """
    before, there = _read(path)
    if name in there:
        raise AlreadyExistsError(
            f"{path} already has a key named {name!r}; choose another name", reason="KEY_EXISTS"
        )
    after = f"{before}\n{table}" if before else table
    try:
        tomllib.loads(after)
    except tomllib.TOMLDecodeError as error:
        raise _bad(path, f"no table can be added to it: {error}") from None
    # A router that reads meanwhile sees the old file or the new one.
    new = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(after)
        new.replace(path)
    except OSError as error:
        raise _bad(path, error) from None


def _read(path: Path) -> tuple[str, Collection[str]]:
    """Return the text of a key file and the names of the keys in it. The text is "" if the file
    does not exist."""
    try:
        text = path.read_text(encoding="utf-8")
        keys = tomllib.loads(text).get("keys", {})
    except FileNotFoundError:
        return "", ()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _bad(path, error) from None
    if not isinstance(keys, dict):
        raise _bad(path, "keys must be a table")
    return text, keys


def _bad(path: Path, problem: object) -> FailedPreconditionError:
    return FailedPreconditionError(f"the file of keys {path}: {problem}", reason="BAD_FILE")
