"""Reads a command's flags from a YAML or TOML file, with lines such as `max-model-len: 4096`."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from outrider.errors import FailedPreconditionError, InvalidRequestError, NotFoundError

MAX_FILE_BYTES: Final = 1 << 20
_YAML: Final = frozenset({".yaml", ".yml"})
_NOT_IN_FILES: Final = frozenset({"config", "help"})


def read_flags(path: Path, add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """Return the flags in a file as command-line arguments, after checking all of them.

    A key is a flag's name without its dashes, with hyphens or underscores. The value of a flag
    without an argument is `true` or `false`. A list becomes several flags if the flag may be
    repeated, and otherwise one value joined by commas. Raises NotFoundError if there is no such
    file. Raises InvalidRequestError (INVALID_CONFIG) if the file is malformed, or if it has an
    unknown key or a value that the flag does not accept.
    """
    parser = _FileParser(path)
    add_arguments(parser)
    flags = [part for key, value in _read(path).items() for part in _flag(parser, path, key, value)]
    parser.parse_args(flags)
    return flags


class _FileParser(argparse.ArgumentParser):
    """An argument parser whose errors name the flags file."""

    def __init__(self, path: Path) -> None:
        super().__init__(allow_abbrev=False)
        self._path = path

    def action_of(self, name: str) -> argparse.Action | None:
        """Return the argparse action of the flag `name`, or None if there is no such flag."""
        return self._option_string_actions.get(f"--{name}")

    def names(self) -> list[str]:
        """Return the keys that are allowed in a file."""
        names = (option[2:] for option in self._option_string_actions if option.startswith("--"))
        return sorted(set(names) - _NOT_IN_FILES)

    def error(self, message: str) -> NoReturn:
        """Raise InvalidRequestError instead of exiting."""
        raise _invalid(self._path, message)


def _flag(parser: _FileParser, path: Path, key: object, value: object) -> list[str]:
    """Return the command-line arguments for one key and its value."""
    name = str(key).replace("_", "-")
    action = parser.action_of(name)
    if action is None or name in _NOT_IN_FILES:
        near = difflib.get_close_matches(name, parser.names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _invalid(path, f"unknown key {key}{hint} (known: {', '.join(parser.names())})")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _invalid(path, f"{key} must be true or false, got {value!r}")
        return [f"--{name}"] if value else []
    if isinstance(value, list) and all(_is_scalar(item) for item in value):
        # A flag that may be repeated has values with commas of their own.
        values = (
            value if isinstance(action, argparse._AppendAction) else [",".join(map(str, value))]
        )
        return [f"--{name}={each}" for each in values]
    if not _is_scalar(value):
        raise _invalid(path, f"{key} must be a text or a number, got {value!r}")
    return [f"--{name}={value}"]


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _read(path: Path) -> Mapping[Any, object]:
    """Return the parsed content of a file. Raises the same errors as `read_flags`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(f"no configuration file at {path}", reason="NO_CONFIG") from None
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _invalid(path, f"has more than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        found = _parse_yaml(path, text) if path.suffix in _YAML else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(path, f"is not TOML (YAML files end in .yaml or .yml): {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _invalid(path, "must hold flags by name")
    return found


def _parse_yaml(path: Path, text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise FailedPreconditionError(
            f"{path} is YAML, which needs the package pyyaml: pip install pyyaml, or use TOML",
            reason="NO_YAML",
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        # A list that nobody closes goes wrong behind the last line.
        last = text.rstrip().count("\n")
        mark = error.problem_mark
        line = last if mark is None else min(last, mark.line)
        # What it got instead is said in the parser's own terms.
        problem = (error.problem or "is not YAML").partition(", but ")[0]
        raise _invalid(path, problem, line=line + 1) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _invalid(path, f"is not YAML: {' '.join(str(error).split())}") from error


def _invalid(path: Path, message: str, *, line: int | None = None) -> InvalidRequestError:
    """Return the error for a file. `line` is the number of the line with the error, counted from
    1."""
    where = f"{path}" if line is None else f"{path} line {line}"
    return InvalidRequestError(f"{where}: {message}", reason="INVALID_CONFIG")
