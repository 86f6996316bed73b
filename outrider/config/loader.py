"""Loads a configuration from its layers: defaults < TOML file < environment < flags."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from outrider.config.builder import from_plain, invalid_config_error
from outrider.config.environment import ProcessEnvironment
from outrider.errors import NotFoundError

ConfigT = TypeVar("ConfigT")

FLAG_SOURCE = "flag"
"""Source that `LoadedConfig.sources` gives for a value from an override or a command-line flag."""


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[ConfigT]):
    """A configuration, and the sources of its values."""

    config: ConfigT
    sources: Mapping[str, str]
    """Maps the dotted key of each value to its source: the path of the TOML file, the name of the
    environment variable, or `flag`. Values that are defaults have no entry."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """Maps the dotted key of each value that a flag has changed to the source of the value before:
    the path of the TOML file or the name of the environment variable."""


def load_config(
    cls: type[ConfigT],
    toml_path: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: ProcessEnvironment | None = None,
) -> ConfigT:
    """Return an instance of the configuration class `cls`, with values from a TOML file,
    environment variables and overrides. Overrides win over variables, and variables win over the
    file.

    A key of `overrides` may be dotted (`"limits.max_queue"`) to set a value in a nested table. An
    override with the value None is ignored. Without `toml_path`, the environment may name the file.

    Raises NotFoundError if the file is missing. Raises InvalidRequestError (reason INVALID_CONFIG)
    for invalid TOML, unknown keys, wrong types and values that the class refuses with a ValueError.
    """
    return load_with_sources(cls, toml_path, overrides, environment=environment).config


def load_with_sources(
    cls: type[ConfigT],
    toml_path: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    environment: ProcessEnvironment | None = None,
) -> LoadedConfig[ConfigT]:
    """Return the configuration that `load_config` returns for these arguments, with the source of
    each value. Raises the same errors."""
    layers = _Layers()
    path = toml_path if toml_path is not None or environment is None else environment.file
    if path is not None:
        layers.add(_read_toml(Path(path)), str(path))
    if environment is not None:
        for setting in environment.settings(cls):
            layers.add(_nested(setting.path, setting.value), setting.variable)
    flags = {key: value for key, value in (overrides or {}).items() if value is not None}
    overridden = {
        key: layers.sources[key]
        for key, value in flags.items()
        if key in layers.sources and str(layers.value_of(key)) != str(value)
    }
    for key, value in flags.items():
        layers.add(_nested(tuple(key.split(".")), value), FLAG_SOURCE)
    return LoadedConfig(from_plain(cls, layers.values), layers.sources, overridden)


def parse_config(
    cls: type[ConfigT],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    role: str,
) -> LoadedConfig[ConfigT]:
    """Return the configuration of a process from its command line, its environment and the TOML
    file.

    `parser` must define `--config`, which names the TOML file, and flags whose destinations are
    dotted keys of the configuration class `cls`. `argv` None means the arguments of this process.
    `role` is router, verifier, drafter or ray; it selects the environment variables
    (`OUTRIDER_<ROLE>_...`). Raises the errors of `load_config`. Ends the process, as argparse does,
    if the command line is invalid.
    """
    flags = vars(parser.parse_args(argv))
    path = flags.pop("config")
    return load_with_sources(cls, path, flags, environment=ProcessEnvironment.for_role(role))


def comma_list(text: str) -> list[str]:
    """Return the non-empty parts of a text that is separated by commas. Use it as the `type` of an
    argparse flag."""
    return [part for part in text.split(",") if part]


@dataclass(slots=True)
class _Layers:
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Merge `values` into the present ones: tables are merged, and all other values are
        replaced."""
        self._merge(self.values, values, source, "")

    def value_of(self, key: str) -> object:
        """Return the value of a dotted key, which must exist."""
        value: Any = self.values
        for name in key.split("."):
            value = value[name]
        return value

    def _merge(
        self, below: dict[str, Any], above: Mapping[str, Any], source: str, where: str
    ) -> None:
        for key, value in above.items():
            name = f"{where}{key}"
            if isinstance(value, Mapping):
                table = below.get(key)
                if not isinstance(table, dict):
                    below[key] = table = {}
                self._merge(table, value, source, f"{name}.")
            else:
                below[key] = value
                self.sources[name] = source


def _nested(path: tuple[str, ...], value: object) -> dict[str, object]:
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, IsADirectoryError):
        raise NotFoundError(f"no configuration file at {path}", reason="NO_CONFIG") from None
    except OSError as error:
        raise invalid_config_error(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid_config_error(f"{path} is not TOML: {error}") from error
