"""TOML writer for configuration values; the standard library only reads TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: object) -> str:
    """Return `value` as TOML text: a boolean, number, string, list or inline table.

    Raises TypeError for values of other types, and ValueError for strings with unpaired surrogates.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"half of a surrogate pair is no character: {value!a}")
            # A JSON text is a TOML text, but for the one character that TOML wants escaped.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
        case list() | tuple():
            return f"[{', '.join(toml_value(item) for item in value)}]"
        case Mapping():
            pairs = (f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            inside = ", ".join(pairs)
            return f"{{ {inside} }}" if inside else "{}"
        case _:
            raise TypeError(f"no TOML value: {value!r}")


def toml_key(name: str) -> str:
    """Return `name`, one part of a dotted key, as TOML text; it is quoted if necessary."""
    return name if _BARE.fullmatch(name) else toml_value(name)
