"""Configuration values from environment variables.

`OUTRIDER_ROUTER_QUEUE_LIMIT=5` sets `queue_limit = 5` for the router. Two underscores separate a
table from its key, as in `OUTRIDER_ROUTER_SPECULATION__TOP_K`. Texts are taken verbatim. Lists are
separated by commas or written as in TOML. Tables are written as in TOML. An empty value unsets an
optional key.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

from outrider.config.annotations import KeysOf
from outrider.config.builder import describe_valid_keys, invalid_config_error

CONFIG_FILE = "CONFIG"
"""End of the name of the variable OUTRIDER_<ROLE>_CONFIG, which names the TOML file."""
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
# Kubernetes tells every container of the services beside it: a Service named outrider-router makes
# OUTRIDER_ROUTER_SERVICE_HOST, OUTRIDER_ROUTER_PORT=tcp://... and more of that kind.
_SERVICE_LINK = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


@dataclass(frozen=True, slots=True)
class EnvironmentSetting:
    """Configuration value that an environment variable sets."""

    variable: str
    path: tuple[str, ...]
    """Names of the tables that contain the key, then the name of the key."""
    value: object
    """Value, in the type that a TOML file would give it. None if the variable unsets the key."""


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Environment variables from which one process reads its configuration."""

    prefix: str
    """Prefix of the variables' names, such as OUTRIDER_ROUTER_."""
    variables: Mapping[str, str]
    """All environment variables, including those that are not for this process."""

    @classmethod
    def for_role(cls, role: str) -> ProcessEnvironment:
        """Return the environment of this process. `role` is router, verifier, drafter or ray."""
        return cls(f"OUTRIDER_{role.upper()}_", os.environ)

    @property
    def file(self) -> str | None:
        """Path of the TOML file that OUTRIDER_<ROLE>_CONFIG names, or None if it is not set."""
        return self.variables.get(self.prefix + CONFIG_FILE) or None

    def settings(self, config: type) -> Iterator[EnvironmentSetting]:
        """Yield the settings of the configuration dataclass `config`, in the order of the
        variables' names.

        Raises InvalidRequestError (reason INVALID_CONFIG) for a variable with this prefix that
        names no field, or whose text does not have the field's type.
        """
        for variable in sorted(self.variables):
            text = self.variables[variable]
            if not variable.startswith(self.prefix) or _is_service_link(variable, text):
                continue
            rest = variable.removeprefix(self.prefix)
            if rest == CONFIG_FILE:
                continue
            path = tuple(part.lower() for part in rest.split("__"))
            hint = _find(config, path, variable, self.prefix)
            try:
                yield EnvironmentSetting(variable, path, _parse(hint, text))
            except ValueError as error:
                raise invalid_config_error(f"{variable}: {error}") from None


def variable_of(role: str, key: str) -> str:
    """Return the name of the environment variable for a dotted key of a process."""
    return f"OUTRIDER_{role.upper()}_{key.replace('.', '__').upper()}"


def _is_service_link(variable: str, text: str) -> bool:
    if _SERVICE_LINK.search(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_URL.match(text) is not None


def _find(config: type, path: tuple[str, ...], variable: str, prefix: str) -> Any:
    """Return the type of the field to which a path leads. Raises InvalidRequestError if there is
    none."""
    hint: Any = config
    for depth, name in enumerate(path):
        above = "".join(f"{part.upper()}__" for part in path[:depth])
        hint = _table_of(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            names = [field.name for field in dataclasses.fields(hint) if field.init]
            if name not in names:
                known = [each.upper() for each in names]
                said = describe_valid_keys(name.upper(), known, prefix + above)
                raise invalid_config_error(f"unknown environment variable {variable}{said}")
            hint = typing.get_type_hints(hint, include_extras=True)[name]
        elif _is_mapping(hint) and name:
            hint = typing.get_args(hint)[1]
        else:
            raise invalid_config_error(
                f"unknown environment variable {variable}: "
                f"{prefix}{above.removesuffix('__')} is no table"
            )
    return hint


def _table_of(hint: Any) -> Any:
    """Return the type that describes the keys of a field.

    For a mapping with `KeysOf` this is the other configuration, and for an optional table it is the
    table's dataclass. Other types are returned without their annotations.
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        tables = [each for each in typing.get_args(hint) if dataclasses.is_dataclass(each)]
        return tables[0] if tables else hint
    if typing.get_origin(hint) is not typing.Annotated:
        return hint
    marks = [mark for mark in hint.__metadata__ if isinstance(mark, KeysOf)]
    return marks[0].config if marks else hint.__origin__


def _is_mapping(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _parse(hint: Any, text: str) -> object:
    """Return the value of a variable's text, in the type that a TOML file would give it. Raises
    ValueError if the text does not have the type `hint`."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _parse(hint.__origin__, text)
    if origin is Union or origin is types.UnionType:
        return _parse_union(typing.get_args(hint), text)
    if isinstance(hint, typing.NewType):
        return _parse(hint.__supertype__, text)
    if origin is tuple:
        return _parse_list(typing.get_args(hint)[0], text)
    if _is_mapping(hint) or dataclasses.is_dataclass(hint):
        return _parse_toml(text, dict, "a table such as { key = 1 }")
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"must be true or false, got {text!r}")
        return _BOOLEANS[text.lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            kind = "an integer" if hint is int else "a number"
            raise ValueError(f"must be {kind}, got {text!r}") from None
    return text


def _parse_union(members: tuple[Any, ...], text: str) -> object:
    if type(None) in members and text == "":
        return None
    problem = ValueError(f"may not be set, got {text!r}")
    for member in members:
        if member is type(None):
            continue
        try:
            return _parse(member, text)
        except ValueError as error:
            problem = error
    raise problem


def _parse_list(member: Any, text: str) -> object:
    if text.lstrip().startswith("["):
        return _parse_toml(text, list, 'a list such as ["a", "b"]')
    return [_parse(member, part.strip()) for part in text.split(",") if part.strip()]


def _parse_toml(text: str, kind: type, example: str) -> object:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        value = {}
    # Text with a line end could hold further keys.
    if list(value) != ["value"] or not isinstance(value["value"], kind):
        raise ValueError(f"must be {example}, got {text!r}")
    return value["value"]
