"""A configuration with every kind of field, and values for any field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from outrider.config import KeysOf, OneOf
from outrider.config.description import ConfigField, ValueType
from outrider.ids import VerifierId


class Colour(StrEnum):
    """Some choices."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A table."""

    size: int = 1
    """How large."""
    secret: str = ""
    """What nobody may see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Every kind
    of field."""

    name: VerifierId
    """Who it is."""
    ratio: float = 0.5
    """A share, at
    most 1; None is not for it."""
    limit: int | None = None
    fast: bool = False
    mode: Annotated[str, OneOf(("a", "b"))] = "a"
    colours: tuple[Colour, ...] = ()
    hosts: tuple[str, ...] = ("h:1",)
    folder: Path = Path()
    file: Path | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    named: Mapping[str, Inner] = field(default_factory=dict)
    some: Annotated[Mapping[str, object], KeysOf(Inner, frozenset({"secret"}))] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.ratio > 1.0:
            raise ValueError("ratio must be at most 1")


def another_value(field: ConfigField) -> object:
    """A value of a field's type, as TOML has it, that is not its default where that can be."""
    return _another(field.value_type, field.default)


def _another(kind: ValueType, default: object) -> object:
    if kind.choices:
        return next(choice for choice in reversed(kind.choices) if choice not in ("", default))
    if kind.word == "keys":
        assert kind.table is not None
        first = next(each for each in kind.table.fields if each.value_type.table is None)
        return {first.name: another_value(first)}
    if kind.item is not None:
        return [_another(kind.item, None)]
    match kind.word:
        case "boolean":
            return not default
        case "integer":
            return default + 1 if isinstance(default, int) else 1
        case "number":
            return default * 0.75 if isinstance(default, float) and default > 0 else 0.75
        case _:
            return "somewhere:1"
