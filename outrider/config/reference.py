"""Reference page of all configuration keys, in Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from outrider.config.description import (
    GENERATED_DEFAULT,
    REQUIRED,
    ConfigField,
    ConfigTable,
    ValueType,
    keys_of,
)
from outrider.config.toml import toml_value

INTRODUCTION = """\
# Configuration

<!-- Written by `outrider config reference` (`make generated`) from the dataclasses: edit those. -->

Every process reads its configuration from four sources. A later source overrides an earlier one:

1. the defaults below;
2. a TOML file: `--config FILE.toml`, or the variable `OUTRIDER_<PROCESS>_CONFIG`;
3. environment variables: `OUTRIDER_<PROCESS>_<KEY>` in capitals, with two underscores for a dot in
   the key: `OUTRIDER_ROUTER_QUEUE_LIMIT=64`, `OUTRIDER_ROUTER_SPECULATION__TOP_K=4`,
   `OUTRIDER_ROUTER_TENANTS__BLUE__WEIGHT=2`. Lists are separated by commas
   (`OUTRIDER_ROUTER_VERIFIERS=a:50051,b:50051`) or written in TOML syntax. An empty value unsets an
   optional key;
4. flags.

`outrider serve` and `outrider generate` start processes that inherit the environment, so variables
apply to those, too. Settings that such a command decides itself (addresses, the model) are passed
as flags. An unknown key, or an unknown variable of a process, is an error that names the most
similar key. The variables that Kubernetes creates for a Service called `outrider-router` and the
like (`OUTRIDER_ROUTER_SERVICE_HOST`, `OUTRIDER_ROUTER_PORT=tcp://...`) are ignored.

    outrider config check router.toml --process router
    outrider config show --process router --config router.toml -- --queue-limit 5
    outrider config schema router

`check` validates a file as the process would, without environment and flags. `show` prints the
effective values as TOML, each with its source. It does not print the values of keys whose names
suggest secrets. `schema` prints the JSON Schema of a file. `deploy/configs/` has the schemas of all
processes: with `#:schema ./router.schema.json` as the first line of a file, editors validate it
while you type. `check` also tests number ranges and keys that require each other, which the schema
does not contain.
"""


def render_page(sections: Iterable[str]) -> str:
    """Return the reference page: the introduction, followed by the sections of the processes."""
    return "\n".join((INTRODUCTION, *sections))


def render_section(title: str, table: ConfigTable, flags: Mapping[str, str]) -> str:
    """Return the section of one process, with its keys as a Markdown table.

    `flags` maps dotted keys to command-line flags.
    """
    lines = [
        f"## {title}",
        "",
        table.text,
        "",
        "| key | type | default | flag | meaning |",
        "|---|---|---|---|---|",
    ]
    for key, field in keys_of(table):
        flag = f"`{flags[key]}`" if key in flags else ""
        cells = (f"`{key}`", _type(field.value_type), _default(field), flag, field.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the command-line flags of each configuration key that has any. The result maps the
    dotted key to its flags, joined by a slash, for instance `--port` or `-p/--port`."""
    found = {}
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "config"):
            found[action.dest] = "/".join(action.option_strings[:2])
    return found


def _type(kind: ValueType) -> str:
    if kind.choices:
        return " or ".join(f"`{choice}`" for choice in kind.choices)
    if kind.item is not None:
        inside = ", ".join(f"`{choice}`" for choice in kind.item.choices) or kind.item.word
        return f"list of {inside}"
    if kind.word == "keys":
        return "table"
    return kind.word


def _default(field: ConfigField) -> str:
    if field.default is REQUIRED:
        return "**needed**"
    if field.default is GENERATED_DEFAULT:
        return "chosen at the start"
    return "unset" if field.default is None else f"`{toml_value(field.default)}`"
