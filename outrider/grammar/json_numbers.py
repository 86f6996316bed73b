"""Refuses JSON schemas with numbers that the grammar library cannot represent exactly.

The library stores numbers in double precision and does not round decimals correctly, so it would
silently change some numbers of a schema. It does not change a number within the limits below: a
double can hold all digits of such a number, and its power of ten is exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Final, NoReturn

from outrider.errors import InvalidRequestError

MAX_INTEGER: Final = 2**53 - 1
"""Largest allowed magnitude of a number that is written without a fraction and without an
exponent."""
MAX_SIGNIFICANT_DIGITS: Final = 15
"""Maximum number of digits of a number with a fraction or an exponent. Leading and trailing zeros
do not count."""
MIN_MAGNITUDE: Final = Decimal("1e-6")
"""Smallest allowed magnitude of a number with a fraction or an exponent. Zero is allowed, too."""
MAX_MAGNITUDE: Final = Decimal("1e15")
"""Exclusive upper limit of the magnitude of a number with a fraction or an exponent."""
ALLOWED_MAXIMA: Final = frozenset({str(2**63 - 1), str(2**64 - 1)})
"""Values of `maximum` that are allowed although they are not exact, because schema generators write
them for 64-bit integers. For both the library allows integers up to 2^63 - 1, so no answer exceeds
them."""
MAX_SHOWN_CHARS: Final = 40
"""Maximum number of characters of a refused number that the error message shows."""

_VALUES: Final = frozenset({"const", "enum"})
"""Keywords whose values are arbitrary JSON values that an answer may equal."""
_BOUNDS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
"""Keywords whose values are numbers."""
_NAMED_SCHEMAS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose values map names to schemas. The names are not keywords."""
_ANNOTATIONS: Final = frozenset({"default", "examples"})
"""Keywords whose values are data that no answer depends on."""


class NumberLiteral(str):
    """A number in a JSON text, exactly as it is written there."""

    __slots__ = ()

    @property
    def is_exact(self) -> bool:
        """Whether the number is within the limits in which the grammar library does not change
        it."""
        if self.removeprefix("-").isdecimal():
            digits = len(str(MAX_INTEGER))
            return len(self.removeprefix("-")) <= digits and abs(int(self)) <= MAX_INTEGER
        try:
            number = Decimal(self)
        except InvalidOperation:
            # Its exponent is beyond all bounds.
            return False
        if number.is_zero():
            return True
        significant = "".join(map(str, number.as_tuple().digits)).strip("0")
        is_short = len(significant) <= MAX_SIGNIFICANT_DIGITS
        return is_short and MIN_MAGNITUDE <= abs(number) < MAX_MAGNITUDE

    @property
    def is_finite(self) -> bool:
        """Whether this number is within the range of a double."""
        return abs(float(self)) < float("inf")


def check_numbers(text: str) -> None:
    """Refuse a JSON schema with numbers that the library would change.

    Raises InvalidRequestError (reason INVALID_STRUCTURE), whose message says what is allowed. A
    malformed text passes, because the library reports what is wrong with it.
    """
    literals: list[NumberLiteral] = []

    def read(literal: str) -> NumberLiteral:
        literals.append(NumberLiteral(literal))
        return literals[-1]

    try:
        schema = json.loads(text, parse_int=read, parse_float=read, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return
    for keyword, number in _numbers(schema):
        if not number.is_exact and not (keyword == "maximum" and number in ALLOWED_MAXIMA):
            raise _refusal(
                f"the number {_shown(number)} in `{keyword}` cannot be kept exactly; integers from "
                f"-{MAX_INTEGER} to {MAX_INTEGER} are allowed, and 0 and numbers with a fraction "
                f"or an exponent of at most {MAX_SIGNIFICANT_DIGITS} significant digits and a "
                f"magnitude from {MIN_MAGNITUDE:f} to below {MAX_MAGNITUDE:f}"
            )
    for number in literals:
        if not number.is_finite:
            raise _refusal(
                f"the number {_shown(number)} is too large; numbers in a schema must be within the "
                "range of double precision"
            )


def _numbers(schema: object) -> Iterator[tuple[str, NumberLiteral]]:
    """Yield the numbers that restrict answers, each with its keyword."""
    schemas = [schema]
    while schemas:
        part = schemas.pop()
        if isinstance(part, list):
            schemas += part
        if not isinstance(part, dict):
            continue
        for keyword, value in part.items():
            if keyword in _VALUES:
                yield from ((keyword, number) for number in _numbers_in(value))
            elif keyword in _BOUNDS and isinstance(value, NumberLiteral):
                yield keyword, value
            elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                schemas += value.values()
            elif keyword not in _ANNOTATIONS:
                schemas.append(value)


def _numbers_in(data: object) -> Iterator[NumberLiteral]:
    """Yield all numbers of a JSON value."""
    parts = [data]
    while parts:
        part = parts.pop()
        if isinstance(part, NumberLiteral):
            yield part
        elif isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def _shown(number: NumberLiteral) -> str:
    return number if len(number) <= MAX_SHOWN_CHARS else f"{number[:MAX_SHOWN_CHARS]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise _refusal(f"{name} is no JSON number; numbers in a schema must be finite")


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured output: {why}", reason="INVALID_STRUCTURE", param="structured_outputs"
    )
