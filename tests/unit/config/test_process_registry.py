"""The configurations of the processes: documented, reachable in every way, committed."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from outrider.config import ProcessEnvironment, load_with_sources
from outrider.config.__main__ import main
from outrider.config.description import ConfigField, describe_config, keys_of, to_plain
from outrider.config.environment import variable_of
from outrider.config.process_registry import PROCESSES
from outrider.config.schema import json_schema
from outrider.config.toml import toml_value
from outrider.errors import InvalidRequestError
from tests.unit.config.samples import Outer, another_value

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "deploy" / "configs"
ROLES = sorted(PROCESSES)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a process."""

    role: str
    name: str
    field: ConfigField

    @property
    def concrete(self) -> str:
        """Its name with a name that is free filled in."""
        return self.name.replace("NAME", "blue")

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"


SCHEMAS = {role: json_schema(PROCESSES[role].table, role) for role in ROLES}
NEEDED: dict[str, dict[str, object]] = {
    "router": {"model": "m", "verifiers": ("v:1",)},
    "drafter": {"model": "m", "methods": ("ngram",)},
    "ray": {"model": "m"},
}
KEYS = [Key(role, *found) for role in ROLES for found in keys_of(PROCESSES[role].table)]


def found_at(key: Key, file: Path | None, environment: ProcessEnvironment) -> object:
    """A key's value in the built configuration; None if it does not go with the others' defaults,
    which is the dataclass's own to say."""
    flags = {name: value for name, value in NEEDED.get(key.role, {}).items() if name != key.name}
    config = PROCESSES[key.role].config
    try:
        value = to_plain(load_with_sources(config, file, flags, environment=environment).config)
    except InvalidRequestError as error:
        assert not re.search(r"unknown|must be (int|float|str|bool|dict|a list)", error.message)
        return None
    for name in key.concrete.split("."):
        assert isinstance(value, dict)
        value = value[name]
    return value


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_key_says_what_it_means(key: Key) -> None:
    assert key.field.text.endswith(".")


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_key_can_be_given_by_file_and_environment(key: Key, tmp_path: Path) -> None:
    value = another_value(key.field)
    file = tmp_path / "some.toml"
    file.write_text(f"{key.concrete} = {toml_value(value)}\n")
    jsonschema.validate(tomllib.loads(file.read_text()), SCHEMAS[key.role])
    text = ",".join(map(str, value)) if isinstance(value, list) else toml_value(value).strip('"')
    variables = {variable_of(key.role, key.concrete): text}
    prefix = f"OUTRIDER_{key.role.upper()}_"
    by_file = found_at(key, file, ProcessEnvironment(prefix, {}))
    by_variable = found_at(key, None, ProcessEnvironment(prefix, variables))
    assert by_file == by_variable
    assert by_file in (value, None)


def test_few_keys_do_not_go_with_the_defaults_of_others(tmp_path: Path) -> None:
    """Of those alone the test above does not see the value arrive."""
    refused = []
    for key in KEYS:
        file = tmp_path / "some.toml"
        file.write_text(f"{key.concrete} = {toml_value(another_value(key.field))}\n")
        if found_at(key, file, ProcessEnvironment("", {})) is None:
            refused.append(str(key))
    assert len(refused) < len(KEYS) / 6, refused


@pytest.mark.parametrize("key", [key for key in KEYS if key.field.value_type.choices], ids=str)
def test_what_the_schema_does_not_offer_is_refused(key: Key, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(f'{key.concrete} = "no such choice"\n')
    last = key.name.rpartition(".")[2]
    with pytest.raises(InvalidRequestError, match=last):
        load_with_sources(PROCESSES[key.role].config, file, NEEDED.get(key.role))
    with pytest.raises(jsonschema.ValidationError, match="no such choice"):
        jsonschema.validate(tomllib.loads(file.read_text()), SCHEMAS[key.role])


@pytest.mark.parametrize("role", ROLES)
def test_flags_are_named_like_the_keys_that_they_set(role: str) -> None:
    keys = {key.name for key in KEYS if key.role == role}
    # Flags that say it the other way round or one item at a time.
    for action in PROCESSES[role].parser._actions:
        if action.dest in ("help", "config"):
            continue
        if action.option_strings[0] == "--trace-ratio":
            assert action.dest == "tracing.sample_ratio"  # as OpenTelemetry says it
            continue
        assert action.dest in keys, action.option_strings
        last = action.dest.rpartition(".")[2].replace("_", "-")
        item = last.removesuffix("s") if type(action).__name__ == "_AppendAction" else last
        whole = action.dest.replace(".", "-").replace("_", "-")
        assert action.option_strings[0] in (f"--{item}", f"--no-{item}", f"--{whole}")


@pytest.mark.parametrize("role", ROLES)
def test_the_committed_schema_is_that_of_the_code(
    role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", role]) == 0
    text = capsys.readouterr().out
    assert (CONFIGS / f"{role}.schema.json").read_text() == text, "run `make generated`"
    jsonschema.Draft7Validator.check_schema(json.loads(text))


def test_the_reference_page_is_that_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == capsys.readouterr().out, "run `make generated`"
    assert all(f"`{key.name}`" in page for key in KEYS)


def test_a_schema_refuses_what_is_unknown_or_of_another_type() -> None:
    schema = json_schema(describe_config(Outer), "Outer")
    jsonschema.validate({"named": {"any": {"size": 3}}, "hosts": ["a"], "mode": "b"}, schema)
    for wrong in (
        {"limt": 3},
        {"inner": {"sise": 3}},
        {"named": {"any": {"sise": 3}}},
        {"limit": "3"},
        {"mode": "c"},
        {"colours": ["green"]},
        {"some": {"secret": "x"}},
        {"some": {"size": "x"}},
        {"hosts": "a"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    assert properties["ratio"]["description"] == "A share, at most 1; unset is not for it."
    assert properties["ratio"]["default"] == 0.5 and "default" not in properties["limit"]
