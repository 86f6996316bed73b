"""Configuration of the processes: defaults, a TOML file, the environment, then flags.

Every process declares one frozen, keyword-only dataclass; its field names are the keys of the TOML
file (a field that is itself a dataclass is a table), the names of environment variables and those
of flags, and the strings under its fields are what the reference page and the JSON schema say.
An unknown key or variable is an error that names the one that may be meant.

__main__.py                `outrider config`.
annotations.py             Annotations of configuration fields.
builder.py                 Builds configuration dataclasses from plain data.
description.py             Describes the fields of a configuration dataclass.
display.py                 Prints the effective configuration.
environment.py             Values of a configuration from environment variables.
loader.py                  Loads a configuration: file, environment, flags.
process_registry.py        The processes that have a configuration, found by the names of their
                           packages.
reference.py               The reference page of all keys, in Markdown.
schema.py                  The JSON Schema of a configuration, for editors, Helm's values and checks
                           before a start.
toml.py                    Writing TOML values; the standard library only reads them.
"""

from outrider.config.annotations import KeysOf, OneOf
from outrider.config.builder import from_plain
from outrider.config.environment import ProcessEnvironment
from outrider.config.loader import (
    LoadedConfig,
    comma_list,
    load_config,
    load_with_sources,
    parse_config,
)

__all__ = [
    "ProcessEnvironment",
    "KeysOf",
    "LoadedConfig",
    "OneOf",
    "comma_list",
    "from_plain",
    "load_with_sources",
    "load_config",
    "parse_config",
]
