"""Flags of `outrider serve` from a file: what counts, and what is refused with the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.client.commands import main
from outrider.errors import InvalidRequestError, NotFoundError

YAML = """\
model: owner/name
served-model-name: mine
max_model_len: 4096
drafter-methods: [ngram, model]
no-prefix-cache: true
no-cuda-graphs: false
drain-timeout-s: 2.5
log-level: warning
"""
TOML = """\
model = "owner/name"
served-model-name = "mine"
max_model_len = 4096
drafter-methods = ["ngram", "model"]
no-prefix-cache = true
no-cuda-graphs = false
drain-timeout-s = 2.5
log-level = "warning"
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML)])
def test_flags_of_a_file_count_like_those_of_the_command_line(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    args = main.parse_arguments(["serve", "--config", str(path)])
    assert (args.model, args.served_model_name, args.max_model_len) == ("owner/name", "mine", 4096)
    assert (args.drafter_methods, args.drain_timeout_s, args.log_level) == (
        "ngram,model",
        2.5,
        "WARNING",
    )
    assert args.no_prefix_cache and not args.no_cuda_graphs


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(YAML)
    flags = ["serve", "--max-model-len", "128", "--config", str(path), "--model=other"]
    args = main.parse_arguments(flags)
    assert (args.model, args.max_model_len, args.served_model_name) == ("other", 128, "mine")


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# nothing yet\n")
    assert main.parse_arguments(["serve", "--config", str(path)]).port == 50050


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "max-model-length: 1", "unknown key max-model-length; did you mean max-model-l"),
        ("a.yaml", "config: b.yaml", "unknown key config"),
        ("a.yaml", "help: true", "unknown key help"),
        ("a.yaml", "1: 2", "unknown key 1"),
        ("a.yaml", "no-prefix-cache: 1", "no-prefix-cache must be true or false, got 1"),
        ("a.yaml", "port: true", "port must be a text or a number, got True"),
        ("a.yaml", "port: {a: 1}", "port must be a text or a number"),
        ("a.yaml", "port:", "port must be a text or a number, got None"),
        ("a.yaml", "port: many", "--port: 'many' is not an integer"),
        ("a.yaml", "dtype: fp8", "--dtype: invalid choice: 'fp8'"),
        ("a.yaml", "- port", "must hold flags by name"),
        ("a.yaml", "port: \0", "is not YAML: unacceptable character"),
        ("a.toml", "port: 1", "is not TOML"),
        ("a", "port: 1", "YAML files end in .yaml or .yml"),
        ("a.toml", "x" * (1 << 21), "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_good_is_refused_by_name(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        main.parse_arguments(["serve", "--config", str(path)])
    assert caught.value.message.startswith(f"{path}: ")
    assert says in caught.value.message
    assert caught.value.reason == "INVALID_CONFIG"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: [1", "line 1: expected ',' or ']'"),
        ("port: 1\nmodel: [1\n\n", "line 2: expected ',' or ']'"),
        ("port: [", "line 1: expected the node content"),
        ("port: 1\n  model: x\n", "line 2: mapping values are not allowed here"),
        ("port: !!python/object:os.system 1", "line 1: could not determine a constructor"),
        ("port: *x", "line 1: found undefined alias"),
    ],
)
def test_malformed_yaml_is_refused_in_one_line_with_its_number(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        main.parse_arguments(["serve", "--config", str(path)])
    assert caught.value.message.startswith(f"{path} {says}")
    assert "\n" not in caught.value.message
    assert caught.value.reason == "INVALID_CONFIG"


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no configuration file at"):
        main.parse_arguments(["serve", "--config", str(tmp_path / "none.yaml")])
