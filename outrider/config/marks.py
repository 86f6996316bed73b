"""What the type of a configuration's field says beyond Python's own types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OneOf:
    """Of a text: the values that it may have, as in `Annotated[str, OneOf(DTYPES)]`.

    For the schema and the reference; the dataclass itself refuses others.
    """

    choices: tuple[str, ...]
