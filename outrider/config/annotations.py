"""Annotations of configuration fields beyond Python's own types: `OneOf` and `KeysOf`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed values of a text field, as in `Annotated[str, OneOf(DTYPES)]`.

    The JSON schema of the configuration and its page in the documentation list these values. This
    class does not check them: a dataclass that uses it checks its own fields.
    """

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysOf:
    """Marks a mapping as optional keys of another configuration; names and types are checked.

    As in `Annotated[Mapping[str, object], KeysOf(RouterConfig)]`.
    """

    config: type[Any]
    excluded: frozenset[str] = frozenset()
    """Keys of `config` that are not allowed here."""
