"""JSON Schema of a configuration, for editors, Helm's values and checks before a start.

The schema covers names, types and choices. Only the dataclass checks number ranges and rules
between keys (`outrider config check`). No key is required, because the environment and flags can
set the keys that a file omits.
"""

from __future__ import annotations

from outrider.config.description import GENERATED_DEFAULT, REQUIRED, ConfigTable, ValueType

DIALECT = "http://json-schema.org/draft-07/schema#"
"""Newest JSON Schema dialect that Helm, editors and Python's jsonschema all support."""
_TYPES = {
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "text": "string",
    "path": "string",
}


def json_schema(table: ConfigTable, title: str) -> dict[str, object]:
    """Return the schema of a process's configuration. The schema has no references, so that it can
    be embedded in another schema.
    """
    return {"$schema": DIALECT, "title": title, **_table(table)}


def _table(table: ConfigTable) -> dict[str, object]:
    properties: dict[str, object] = {}
    for field in table.fields:
        said: dict[str, object] = {"description": field.text} if field.text else {}
        said |= _kind(field.value_type)
        # TOML cannot say "unset", and the defaults of a table are those of its keys.
        absent = field.default is None or field.default in (GENERATED_DEFAULT, REQUIRED)
        if not absent and field.value_type.table is None:
            said["default"] = field.default
        properties[field.name] = said
    return {
        "description": table.text,
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _kind(kind: ValueType) -> dict[str, object]:
    if kind.table is not None:
        # What the table is for is said where it is a key.
        return {key: value for key, value in _table(kind.table).items() if key != "description"}
    if kind.item is not None:
        if kind.word == "list":
            return {"type": "array", "items": _kind(kind.item)}
        return {"type": "object", "additionalProperties": _kind(kind.item)}
    if kind.choices:
        return {"type": "string", "enum": list(kind.choices)}
    return {"type": _TYPES[kind.word]}
