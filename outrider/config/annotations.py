"""What the type of a configuration's field says beyond Python's own types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """Of a text: the values that it may have, as in `Annotated[str, OneOf(DTYPES)]`.

    For the schema and the reference; the dataclass itself refuses others.
    """

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysOf:
    """Of a mapping: some keys of another configuration, none of which is needed, as in
    `Annotated[Mapping[str, object], KeysOf(RouterConfig)]`. Names and types are checked."""

    config: type[Any]
    excluded: frozenset[str] = frozenset()
    """Keys that may not be given here."""
