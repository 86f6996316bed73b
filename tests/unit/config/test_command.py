"""`outrider config`: what it prints, what it refuses, what it does not tell."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outrider.config import LoadedConfig, ProcessEnvironment, load_with_sources
from outrider.config.__main__ import main
from outrider.config.display import REDACTED, as_json, as_toml
from tests.unit.config.samples import Outer

Captured = pytest.CaptureFixture[str]
CONFIGS = Path(__file__).parents[3] / "deploy" / "configs"


def loaded() -> LoadedConfig[object]:
    variables = {"O_NAME": 'a "b"\x7f', "O_INNER__SECRET": "s3cr3t", "O_FILE": "/k"}
    return load_with_sources(
        Outer,
        None,
        {"named": {"x": {"size": 2, "secret": "t0p"}, "token": {"size": 3}}},
        environment=ProcessEnvironment("O_", variables),
    )


def test_what_is_shown_gives_the_same_configuration_again(tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(as_toml(loaded()).replace(REDACTED, "s3cr3t", 1).replace(REDACTED, "t0p"))
    assert load_with_sources(Outer, file).config == loaded().config


def test_secrets_are_not_shown() -> None:
    for text in (as_toml(loaded()), as_json(loaded())):
        assert "s3cr3t" not in text and "t0p" not in text
    said = json.loads(as_json(loaded()))
    assert said["inner.secret"] == {"value": REDACTED, "source": "O_INNER__SECRET"}
    assert said["named.x.size"] == {"value": 2, "source": "flag"}
    assert said["named.token.size"]["value"] == 3, "what a user calls something is no secret"
    assert said["limit"] == {"value": None, "source": "default"}


def test_a_process_is_shown_as_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER_QUEUE_LIMIT", "7")
    file = str(CONFIGS / "router.toml")
    flags = ["--", "--fan-out", "3", "--verifier", "v:1"]
    assert main(["show", "--process", "router", "--config", file, *flags]) == 0
    shown = capsys.readouterr().out
    assert "queue_limit = 7  # OUTRIDER_ROUTER_QUEUE_LIMIT\n" in shown
    assert "speculation.fan_out = 3  # flag\n" in shown
    assert f"metrics_port = 9100  # {file}\n" in shown
    assert tomllib.loads(shown)["verifiers"] == ["v:1"]


def test_a_drafters_flags_are_read_as_the_drafter_reads_them(capsys: Captured) -> None:
    flags = ["--", "--methods", "ngram,model", "--draft-model", "m", "--no-shared-memory"]
    assert main(["show", "--process", "drafter", "--json", *flags]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["methods"] == {"value": ["ngram", "model"], "source": "flag"}
    assert said["shared_memory"] == {"value": False, "source": "flag"}


def test_a_file_is_checked_without_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTRIDER_ROUTER_NO_SUCH", "7")
    assert main(["check", str(CONFIGS / "router.toml"), "--process", "router"]) == 0
    assert "router.toml" in capsys.readouterr().out
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("max_session = 3\n")
    assert main(["check", str(wrong), "--process", "verifier"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "did you mean max_sessions?" in captured.err
    assert main(["show", "--process", "router"]) == 2
    assert "OUTRIDER_ROUTER_NO_SUCH" in capsys.readouterr().err


def test_the_outrider_command_has_it() -> None:
    # A process of its own: the command becomes the module.
    schema = json.loads(outrider("schema", "verifier", status=0))
    assert schema["title"] == "Configuration: verifier"
    assert outrider("schema", "sidecar", status=2) == ""


def outrider(*args: str, status: int) -> str:
    """What `outrider config` prints."""
    command = [sys.executable, "-m", "outrider.client.commands.main", "config", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout
