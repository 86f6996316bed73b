"""Configuration shared by the three processes: a TOML file, then flags, into a frozen dataclass.

Every process declares one frozen, keyword-only dataclass. `load_config` fills it from a TOML file
whose keys are the field names (a field that is itself a dataclass is a TOML table) and from
overrides given on the command line. An unknown key is an error that names the known ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

from outrider.errors import InvalidRequestError, NotFoundError

ConfigT = TypeVar("ConfigT")


def load_config(
    cls: type[ConfigT],
    toml_path: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
) -> ConfigT:
    """Build `cls` from a TOML file and overrides; an override of None means "not given".

    An override's key may be dotted (`"limits.max_queue"`) to reach into a nested table.
    Raises NotFoundError if the file is missing, InvalidRequestError (reason INVALID_CONFIG) for
    bad TOML, unknown keys, wrong types and values that the dataclass refuses (ValueError).
    """
    values = _read_toml(Path(toml_path)) if toml_path is not None else {}
    for key, value in (overrides or {}).items():
        if value is not None:
            _set_dotted(values, key, value)
    return _build(cls, values, where="")


def from_plain(cls: type[ConfigT], values: Mapping[str, object]) -> ConfigT:
    """Build `cls` from plain data, as `dataclasses.asdict` and JSON leave it.

    Raises InvalidRequestError (reason INVALID_CONFIG) like `load_config`.
    """
    return _build(cls, values, where="")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise NotFoundError(f"no configuration file at {path}", reason="NO_CONFIG") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"{path} is not TOML: {error}") from error


def _set_dotted(values: dict[str, Any], key: str, value: object) -> None:
    *tables, last = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[last] = value


def _build(cls: type[ConfigT], values: Mapping[str, object], *, where: str) -> ConfigT:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls} is not a dataclass")
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {where}{near[0]}?" if near else ""
            known = ", ".join(sorted(names))
            raise _invalid(f"unknown configuration key {where}{key}{hint} (known: {known})")
    hints = typing.get_type_hints(cls)
    arguments = {
        key: _convert(hints[key], value, where=f"{where}{key}") for key, value in values.items()
    }
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.name not in arguments and _required(field)
    ]
    if missing:
        raise _invalid(f"missing configuration keys: {', '.join(where + name for name in missing)}")
    try:
        return cls(**arguments)
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise _invalid(f"invalid configuration: {error}") from error


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: object, *, where: str) -> object:
    """Check `value` against a field's type: scalars, enums, paths, tuples, maps, dataclasses."""
    origin = typing.get_origin(hint)
    if origin is Union or origin is types.UnionType:
        return _convert_union(hint, value, where=where)
    if origin is tuple:
        return _convert_tuple(typing.get_args(hint), value, where=where)
    if origin is not None and issubclass(origin, Mapping):
        inner = typing.get_args(hint)[1]
        table = _expect(dict, value, where)
        return {key: _convert(inner, item, where=f"{where}.{key}") for key, item in table.items()}
    if isinstance(hint, typing.NewType):
        return _convert(hint.__supertype__, value, where=where)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        return _build(typing.cast(type, hint), _expect(dict, value, where), where=f"{where}.")
    return _convert_scalar(hint, value, where=where)


def _convert_union(hint: Any, value: object, *, where: str) -> object:
    members = typing.get_args(hint)
    if value is None and type(None) in members:
        return None
    problem: InvalidRequestError | None = None
    for member in members:
        if member is type(None):
            continue
        try:
            return _convert(member, value, where=where)
        except InvalidRequestError as error:
            problem = error
    raise problem or _invalid(f"{where} may not be set")


def _convert_tuple(members: tuple[Any, ...], value: object, *, where: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise _invalid(f"{where} must be a list, got {value!r}")
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise _invalid(f"{where} must have {len(members)} elements, got {len(value)}")
    pairs = zip(members, value, strict=True)
    return tuple(_convert(m, v, where=f"{where}[{i}]") for i, (m, v) in enumerate(pairs))


def _convert_scalar(hint: Any, value: object, *, where: str) -> object:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in hint)
            raise _invalid(f"{where} must be one of {allowed}, got {value!r}") from None
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(hint, value, where)


def _expect(hint: Any, value: object, where: str) -> Any:
    if not isinstance(hint, type):
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _invalid(f"{where} must be {hint.__name__}, got {value!r}")
    return value


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_CONFIG")
