"""Configuration of the processes: defaults, a TOML file, the environment, then flags.

Every process declares one frozen, keyword-only dataclass. The names of its fields are the keys of
the TOML file, the names of the environment variables and the names of the flags. A field that is
itself a dataclass is a table of the TOML file. The strings under the fields are the texts of the
reference page and of the JSON schema. An unknown key or variable is an error that names the known
key that is most similar.

__main__.py                `outrider config`: prints schemas, the reference page and effective
                           values, and checks files.
annotations.py             Annotations of configuration fields beyond Python's own types: `OneOf`
                           and `KeysOf`.
builder.py                 Builds frozen configuration dataclasses from plain data (TOML, JSON);
                           checks names and types.
description.py             Describes a configuration dataclass: its fields with types, defaults and
                           texts.
display.py                 Displays the effective values of a configuration as TOML or JSON, each
                           with its source.
environment.py             Configuration values from environment variables.
hooks.py                   Hooks: modules of an operator that change a process before it is built.
loader.py                  Loads a configuration from its layers: defaults < TOML file < environment
                           < flags.
process_registry.py        Registry of the processes that have a configuration, each with the name
                           of its Python package.
reference.py               Reference page of all configuration keys, in Markdown.
schema.py                  JSON Schema of a configuration, for editors, Helm's values and checks
                           before a start.
toml.py                    TOML writer for configuration values; the standard library only reads
                           TOML.
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
