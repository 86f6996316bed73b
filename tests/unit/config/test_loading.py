"""Defaults, then a TOML file, then the environment, then flags; mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.config import ProcessEnvironment, from_plain, load_config, load_with_sources
from outrider.config.environment import variable_of
from outrider.errors import InvalidRequestError, NotFoundError
from outrider.ids import VerifierId
from tests.unit.config.samples import Colour, Inner, Outer


def environment(**variables: str) -> ProcessEnvironment:
    return ProcessEnvironment(
        "OUTRIDER_OUTER_", {f"OUTRIDER_OUTER_{k}": v for k, v in variables.items()}
    )


def load_text(tmp_path: Path, text: str, **overrides: object) -> Outer:
    """Load from a file with this text."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_config(Outer, file, overrides)


def test_values_of_the_file_get_the_types_of_the_fields(tmp_path: Path) -> None:
    text = 'name = "v"\nratio = 1\ncolours = ["red"]\nfolder = "/x"\n[inner]\nsize = 3\n'
    expected = Outer(
        name=VerifierId("v"),
        ratio=1.0,
        colours=(Colour.RED,),
        folder=Path("/x"),
        inner=Inner(size=3),
    )
    assert load_text(tmp_path, text) == expected


def test_a_flag_wins_over_the_file_and_one_that_is_not_given_does_not(tmp_path: Path) -> None:
    config = load_text(tmp_path, 'name = "v"\nratio = 0.2\n', ratio=None, limit=4)
    assert (config.ratio, config.limit) == (0.2, 4)
    assert load_config(Outer, None, {"name": "v", "inner.size": 9}).inner.size == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "v"\nlimt = 3\n', "limt; did you mean limit"),
        ('name = "v"\n[inner]\nsise = 3\n', "inner.size"),
        ("ratio = 0.5\n", "name"),
        ('name = "v"\nratio = 7\n', "ratio"),
        ('name = "v"\nlimit = "x"\n', "limit"),
        ('name = "v"\nlimit = true\n', "limit"),
        ('name = "v"\ncolours = ["guess"]\n', "guess"),
        ("name = ", "TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load_text(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(NotFoundError, match=path.name):
            load_config(Outer, path)


def test_every_layer_wins_over_the_one_below_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "outer.toml"
    file.write_text('name = "file"\nlimit = 1\nratio = 0.1\n[named.blue]\nsize = 2\n')
    loaded = load_with_sources(
        Outer,
        None,
        {"ratio": 0.3, "inner.size": None},
        environment=environment(
            CONFIG=str(file), LIMIT="2", RATIO="0.2", NAMED__BLUE__SECRET="s", INNER__SIZE="5"
        ),
    )
    config = loaded.config
    assert (config.name, config.limit, config.ratio, config.mode) == ("file", 2, 0.3, "a")
    assert config.named == {"blue": Inner(size=2, secret="s")} and config.inner.size == 5
    assert loaded.sources == {
        "name": str(file),
        "limit": "OUTRIDER_OUTER_LIMIT",
        "ratio": "flag",
        "named.blue.size": str(file),
        "named.blue.secret": "OUTRIDER_OUTER_NAMED__BLUE__SECRET",
        "inner.size": "OUTRIDER_OUTER_INNER__SIZE",
    }


def test_a_file_that_is_given_wins_over_one_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\n')
    elsewhere = environment(CONFIG=str(tmp_path / "none.toml"))
    assert load_config(Outer, tmp_path / "a.toml", environment=elsewhere).name == "a"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("NAME", "12", {"name": "12"}),
        ("FAST", "true", {"fast": True}),
        ("FAST", "0", {"fast": False}),
        ("LIMIT", "-3", {"limit": -3}),
        ("LIMIT", "", {"limit": None}),
        ("RATIO", "1e-1", {"ratio": 0.1}),
        ("FILE", "", {"file": None}),
        ("FILE", "/a,b", {"file": Path("/a,b")}),
        ("HOSTS", "a:1, b:2", {"hosts": ("a:1", "b:2")}),
        ("HOSTS", '["a,b", "c"]', {"hosts": ("a,b", "c")}),
        ("HOSTS", "", {"hosts": ()}),
        ("COLOURS", "red,blue", {"colours": (Colour.RED, Colour.BLUE)}),
        ("INNER", "{ size = 4 }", {"inner": Inner(size=4)}),
        ("MAYBE__SIZE", "4", {"maybe": Inner(size=4)}),
        ("MAYBE", "", {"maybe": None}),
        ("SOME__SIZE", "4", {"some": {"size": 4}}),
        ("SOME", "{ size = 4 }", {"some": {"size": 4}}),
        ("NAMED__A_B__SIZE", "4", {"named": {"a_b": Inner(size=4)}}),
        ("NAMED", '{ "x.y" = { size = 4 } }', {"named": {"x.y": Inner(size=4)}}),
    ],
)
def test_a_variable_is_read_by_the_type_of_its_field(
    variable: str, text: str, expected: dict[str, object]
) -> None:
    config = load_config(Outer, environment=environment(**{"NAME": "v", variable: text}))
    assert config == Outer(**({"name": VerifierId("v")} | expected))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("LIMT", "3", r"OUTRIDER_OUTER_LIMT; did you mean OUTRIDER_OUTER_LIMIT\?"),
        ("INNER__SISE", "3", r"did you mean OUTRIDER_OUTER_INNER__SIZE\?"),
        ("NAMED__A__SISE", "3", r"did you mean OUTRIDER_OUTER_NAMED__A__SIZE\?"),
        ("SOME__SECRET", "x", "some.secret may not be given here"),
        ("SOME__SIZE", "x", "OUTRIDER_OUTER_SOME__SIZE: must be an integer"),
        ("SOME", "{ sise = 3 }", "some.sise; did you mean some.size"),
        ("SOME", '{ size = "x" }', "some.size must be int"),
        ("LIMIT__SIZE", "3", "OUTRIDER_OUTER_LIMIT is no table"),
        ("LIMIT", "three", "OUTRIDER_OUTER_LIMIT: must be an integer, got 'three'"),
        ("RATIO", "half", "must be a number"),
        ("FAST", "yes", "must be true or false"),
        ("INNER", "size = 4", "must be a table"),
        ("INNER", "{ size = 4 }\nname = 'x'", "must be a table"),
        ("HOSTS", "[1", "must be a list"),
        ("HOSTS", "[1]", r"hosts\[0\] must be str"),
        ("COLOURS", "green", "'red', 'blue', got 'green'"),
        ("RATIO", "2", "ratio must be at most 1"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(variable: str, text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        load_config(Outer, environment=environment(**{"NAME": "v", variable: text}))


def test_variables_of_others_and_of_kubernetes_services_are_left_alone() -> None:
    others = {
        "OUTRIDER_HOME": "/x",
        "OUTRIDER_OTHER_LIMIT": "3",
        "OUTRIDER_OUTER_SERVICE_HOST": "10.0.0.1",
        "OUTRIDER_OUTER_SERVICE_PORT": "50050",
        "OUTRIDER_OUTER_SERVICE_PORT_GRPC": "50050",
        "OUTRIDER_OUTER_PORT": "tcp://10.0.0.1:50050",
        "OUTRIDER_OUTER_PORT_50050_TCP": "tcp://10.0.0.1:50050",
        "OUTRIDER_OUTER_PORT_50050_TCP_ADDR": "10.0.0.1",
        "OUTRIDER_OUTER_METRICS_PORT": "tcp://10.0.0.1:9100",
    }
    variables = {"OUTRIDER_OUTER_NAME": "v", **others}
    assert load_with_sources(
        Outer, environment=ProcessEnvironment("OUTRIDER_OUTER_", variables)
    ).sources == {"name": "OUTRIDER_OUTER_NAME"}
    with pytest.raises(InvalidRequestError, match="METRICS_PORT"):
        load_config(Outer, environment=environment(NAME="v", METRICS_PORT="9100"))


def test_plain_data_is_read_without_any_environment() -> None:
    assert from_plain(Outer, {"name": "v"}) == Outer(name=VerifierId("v"))
    assert variable_of("outer", "inner.size") == "OUTRIDER_OUTER_INNER__SIZE"


def test_a_file_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(InvalidRequestError, match="not TOML"):
        load_config(Outer, tmp_path / "deep.toml")
    # A name too long is refused by the system itself, to root as well.
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_config(Outer, tmp_path / ("x" * 300))


def test_what_stands_where_a_table_should_be_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        load_text(tmp_path, 'name = "v"\ninner = "sk-secret"\n')
    assert "sk-secret" not in str(refused.value)
