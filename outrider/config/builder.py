"""Builds frozen configuration dataclasses from plain data (TOML, JSON); checks names and types."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

from outrider.config.annotations import KeysOf
from outrider.errors import InvalidRequestError

ConfigT = TypeVar("ConfigT")


def from_plain(cls: type[ConfigT], values: Mapping[str, object]) -> ConfigT:
    """Build the dataclass `cls` from plain data, such as the result of `dataclasses.asdict` or of a
    JSON parser.

    Raises InvalidRequestError (INVALID_CONFIG) for unknown or missing keys, wrong types, and values
    for which the dataclass raises ValueError.
    """
    return _build(cls, values, where="")


def _build(cls: type[ConfigT], values: Mapping[str, object], *, where: str) -> ConfigT:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls} is not a dataclass")
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    _check_names(values, names, where)
    hints = typing.get_type_hints(cls, include_extras=True)
    arguments = {
        key: _convert(hints[key], value, where=f"{where}{key}") for key, value in values.items()
    }
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.name not in arguments and _required(field)
    ]
    if missing:
        raise invalid_config_error(
            f"missing configuration keys: {', '.join(where + name for name in missing)}"
        )
    try:
        return cls(**arguments)
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise invalid_config_error(f"invalid configuration: {error}") from error


def _check_names(values: Mapping[str, object], names: Sequence[str], where: str) -> None:
    for key in values:
        if key not in names:
            raise invalid_config_error(
                f"unknown configuration key {where}{key}{describe_valid_keys(key, names, where)}"
            )


def describe_valid_keys(key: str, names: Sequence[str], where: str = "") -> str:
    """Return the end of an error message about the unknown key `key`: the most similar of `names`,
    and all `names`.

    `where` is the prefix of the known keys, such as "speculation.".
    """
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {where}{near[0]}?" if near else ""
    return f"{hint} (known: {', '.join(sorted(names))})"


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: object, *, where: str) -> object:
    """Check `value` against a field's type and return it in that type. Raises
    InvalidRequestError.
    """
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        for mark in hint.__metadata__:
            if isinstance(mark, KeysOf):
                return _check_keys(mark, _expect(dict, value, where), where=f"{where}.")
        return _convert(hint.__origin__, value, where=where)
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


def _check_keys(mark: KeysOf, values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Check some keys of another configuration and return them. Its dataclass is built from them
    later."""
    hints = typing.get_type_hints(mark.config, include_extras=True)
    for key in values:
        if key in mark.excluded:
            raise invalid_config_error(
                f"{where}{key} may not be given here: another key decides it"
            )
    fields = dataclasses.fields(mark.config)
    _check_names(values, [f.name for f in fields if f.init and f.name not in mark.excluded], where)
    for key, value in values.items():
        _convert(hints[key], value, where=f"{where}{key}")
    return values


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
    raise problem or invalid_config_error(f"{where} may not be set")


def _convert_tuple(members: tuple[Any, ...], value: object, *, where: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise invalid_config_error(f"{where} must be a list, got {value!r}")
    if len(members) == 2 and members[1] is Ellipsis:
        members = (members[0],) * len(value)
    if len(members) != len(value):
        raise invalid_config_error(f"{where} must have {len(members)} elements, got {len(value)}")
    pairs = zip(members, value, strict=True)
    return tuple(_convert(m, v, where=f"{where}[{i}]") for i, (m, v) in enumerate(pairs))


def _convert_scalar(hint: Any, value: object, *, where: str) -> object:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in hint)
            raise invalid_config_error(f"{where} must be one of {allowed}, got {value!r}") from None
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(hint, value, where)


def _expect(hint: Any, value: object, where: str) -> Any:
    if not isinstance(hint, type):
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        # A value in place of a table may be a secret, so only its type is shown.
        got = type(value).__name__ if hint is dict else repr(value)
        raise invalid_config_error(f"{where} must be {hint.__name__}, got {got}")
    return value


def invalid_config_error(message: str) -> InvalidRequestError:
    """Return the error for an invalid configuration."""
    return InvalidRequestError(message, reason="INVALID_CONFIG")
