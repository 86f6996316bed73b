"""Displays the effective values of a configuration as TOML or JSON, each with its source."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from outrider.config.description import ValueType, describe_config, to_plain
from outrider.config.loader import LoadedConfig
from outrider.config.toml import toml_key, toml_value

REDACTED = "(redacted)"
DEFAULT = "default"
# A field that holds a secret is named like one. Fields that hold the path of a file with secrets
# say so in another way (`api_keys`, `key`) and may be shown; so may whatever is named by a user.
_SECRET = re.compile(r"(^|_)(secret|password|passphrase|token|api_key|headers)$")


def as_toml(loaded: LoadedConfig[object]) -> str:
    """Return the text of a TOML file that gives the same configuration. Unset keys are comments."""
    lines = []
    for key, value, source in _values(loaded):
        text = f"# {key} is unset" if value is None else f"{key} = {toml_value(value)}"
        lines.append(f"{text}  # {source}")
    return "\n".join(lines) + "\n"


def as_json(loaded: LoadedConfig[object]) -> str:
    """Return the text of a JSON object that maps each dotted key to its `value` and its
    `source`."""
    values = {key: {"value": value, "source": source} for key, value, source in _values(loaded)}
    return json.dumps(values, indent=2) + "\n"


def _values(loaded: LoadedConfig[object]) -> Iterator[tuple[str, object, str]]:
    root, kind = (
        to_plain(loaded.config),
        ValueType("table", table=describe_config(type(loaded.config))),
    )
    assert isinstance(root, Mapping)
    yield from _walk(root, kind, loaded.sources, (), secret=False)


def _walk(
    values: Mapping[str, object],
    kind: ValueType,
    sources: Mapping[str, str],
    above: tuple[str, ...],
    *,
    secret: bool,
) -> Iterator[tuple[str, object, str]]:
    """Yield (dotted key, displayed value, source) of each value below the key `above`.

    `kind` is the type of the table `values`. With `secret` all values of the table are redacted.
    """
    fields = {field.name: field.value_type for field in kind.table.fields} if kind.table else {}
    for name, value in values.items():
        path = (*above, name)
        below = fields.get(name) or kind.item
        assert below is not None, "every value is of a field, or named by a user"
        hidden = secret or (name in fields and _SECRET.search(name) is not None)
        if isinstance(value, Mapping) and value:
            yield from _walk(value, below, sources, path, secret=hidden)
            continue
        key = ".".join(toml_key(part) for part in path)
        if hidden and value not in (None, "", [], {}):
            value = REDACTED
        yield key, value, sources.get(".".join(path), DEFAULT)
