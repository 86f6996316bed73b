"""Annotations of configuration fields beyond Python's own types: `OneOf` and `KeysOf`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed values of a string field, as in `Annotated[str, OneOf(DTYPES)]`.

    The JSON schema of the configuration and its page in the documentation list these values. This
    class does not check them: a dataclass that uses it checks its own fields.
    """

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeysOf:
    """Annotation of a mapping that holds some keys of another configuration dataclass.

    An example is `Annotated[Mapping[str, object], KeysOf(RouterConfig)]`. All keys are optional.
    `outrider.config.builder` checks their names and the types of their values.
    """

    config: type[Any]
    excluded: frozenset[str] = frozenset()
    """Keys of `config` that the mapping must not contain."""
