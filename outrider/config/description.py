"""Describes a configuration dataclass: its fields with types, defaults and texts.

The reference page, the JSON Schema and the display of values are made from these descriptions.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union

from outrider.config.annotations import KeysOf, OneOf

GENERATED_DEFAULT = object()
"""Marks the default of a field whose value each process generates for itself."""
REQUIRED = object()
"""Marks a field without a default, which must be set."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """Type of the value of a configuration key. It does not say whether the value may be unset."""

    word: str
    """Name of the type: boolean, integer, number, text, path, list, table, tables (by name) or keys
    (some keys of a table).
    """
    choices: tuple[str, ...] = ()
    """Allowed values of a text. An empty tuple allows any text."""
    item: ValueType | None = None
    """Type of the items of a list, or of each table of `tables`; None for other types."""
    table: ConfigTable | None = None
    """Keys of a table; None for other types."""


@dataclass(frozen=True, slots=True)
class ConfigField:
    """Description of one key of a configuration."""

    name: str
    value_type: ValueType
    default: object
    """Default as a plain value (None if unset), GENERATED_DEFAULT or REQUIRED."""
    text: str
    """Description of the key, in one paragraph."""


@dataclass(frozen=True, slots=True)
class ConfigTable:
    """Description of a configuration dataclass: its text and its keys."""

    text: str
    fields: tuple[ConfigField, ...]


def describe_config(cls: type) -> ConfigTable:
    """Return the description of a configuration dataclass, with its keys in the order of the
    fields.

    Raises TypeError for a field whose type TOML does not have.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    texts = _texts(cls)
    fields = tuple(
        ConfigField(
            field.name, _kind(hints[field.name]), _default(field), texts.get(field.name, "")
        )
        for field in dataclasses.fields(cls)
        if field.init
    )
    return ConfigTable(_paragraph(inspect.getdoc(cls) or ""), fields)


def keys_of(table: ConfigTable, where: str = "") -> Iterator[tuple[str, ConfigField]]:
    """Yield (dotted name, field) for every key that is not a table. All dotted names begin with
    `where`.

    In a dotted name, NAME stands for a name that users choose.
    """
    for field in table.fields:
        kind, name = field.value_type, f"{where}{field.name}"
        if kind.item is not None and kind.item.table is not None:
            kind, name = kind.item, f"{name}.NAME"
        if kind.table is None or kind.word == "keys":
            yield name, field
        else:
            yield from keys_of(kind.table, f"{name}.")


def to_plain(value: object) -> object:
    """Return a field's value as plain data that TOML can hold, or None if it is unset."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _kind(hint: Any) -> ValueType:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        for mark in hint.__metadata__:
            if isinstance(mark, OneOf):
                return dataclasses.replace(_kind(hint.__origin__), choices=mark.choices)
            if isinstance(mark, KeysOf):
                return ValueType(
                    "keys", table=_without(describe_config(mark.config), mark.excluded)
                )
        return _kind(hint.__origin__)
    if origin is Union or origin is types.UnionType:
        members = [each for each in typing.get_args(hint) if each is not type(None)]
        if len(members) != 1:
            raise TypeError(f"a field of more than one type: {hint}")
        return _kind(members[0])
    if origin is tuple:
        return ValueType("list", item=_kind(typing.get_args(hint)[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return ValueType("tables", item=_kind(typing.get_args(hint)[1]))
    if isinstance(hint, typing.NewType):
        return _kind(hint.__supertype__)
    if isinstance(hint, type):
        if dataclasses.is_dataclass(hint):
            return ValueType("table", table=describe_config(hint))
        if issubclass(hint, Enum):
            return ValueType("text", choices=tuple(str(member.value) for member in hint))
    words = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}
    if hint not in words:
        raise TypeError(f"a field of a type that is not for configurations: {hint}")
    return ValueType(words[hint])


def _without(table: ConfigTable, names: frozenset[str]) -> ConfigTable:
    fields = tuple(field for field in table.fields if field.name not in names)
    return dataclasses.replace(table, fields=fields)


def _default(field: dataclasses.Field[Any]) -> object:
    factory = field.default_factory
    if factory is not dataclasses.MISSING:
        value = factory()
        return to_plain(value) if value == factory() else GENERATED_DEFAULT
    return REQUIRED if field.default is dataclasses.MISSING else to_plain(field.default)


def _texts(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class and its bases, by field name."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for above, below in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                # Python's None is a key that the file leaves out.
                found[above.target.id] = re.sub(r"\bNone\b", "unset", _paragraph(below.value.value))
    return found


def _paragraph(text: str) -> str:
    return " ".join(text.split())
