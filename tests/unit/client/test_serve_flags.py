"""What `outrider serve` makes of its flags: arguments of the processes, or of Ray's launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.client import cli, local, serve
from outrider.client.modelfiles import ModelFiles
from outrider.errors import InvalidRequestError
from tests.unit.client.flags import flags_of

Parsed = Callable[..., local.LocalConfig]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """The configuration that flags mean, of a model that is there."""
    files = ModelFiles(path=Path("/models/tiny"), name="tiny", head=Path("/heads/tiny"))
    monkeypatch.setattr(serve, "find_model", lambda *_, **__: files)

    def parse(*flags: str) -> local.LocalConfig:
        return serve.make_config(cli.make_parser().parse_args(["serve", *flags]))

    return parse


def test_look_ahead_is_a_default_of_the_routers(parsed: Parsed) -> None:
    router = flags_of(local.router_args(parsed("--look-ahead", "0", "--fan-out", "8"), "v", "d"))
    assert (router["look-ahead"], router["fan-out"]) == ("0", "8")
    router = flags_of(local.router_args(parsed("--look-ahead", "auto"), "v", "d"))
    assert "look-ahead" not in router and "fan-out" not in router
    ray = flags_of(serve.ray_args(parsed("--look-ahead", "1")))
    assert ray["look-ahead"] == "1" and "fan-out" not in ray


def test_only_the_drafter_is_slowed_down(parsed: Parsed) -> None:
    config = parsed("--exchange-delay-ms", ".5", "--drafter-slowdown", "2")
    drafter = flags_of(local.drafter_args(config))
    assert (drafter["bench-exchange-delay-ms"], drafter["bench-slowdown"]) == ("0.5", "2.0")
    usual = [*local.drafter_args(parsed()), *local.verifier_args(config)]
    assert not any("bench" in part for part in usual)


def test_both_sides_of_the_exchange_leave_a_timeline(parsed: Parsed) -> None:
    config = parsed("--trace-dir", "/traces")
    assert flags_of(local.drafter_args(config))["trace-file"] == "/traces/drafter.json"
    assert flags_of(local.verifier_args(config))["trace-file"] == "/traces/verifier.json"
    assert "--trace-file" not in local.verifier_args(parsed())


@pytest.mark.parametrize(
    "flags",
    [("--exchange-delay-ms", "1"), ("--drafter-slowdown", "2"), ("--trace-dir", "/traces")],
)
def test_ray_refuses_what_only_processes_have(parsed: Parsed, flags: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=flags[0]):
        serve.ray_args(parsed(*flags))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--exchange-delay-ms", "-1"], "at least 0"),
        (["--exchange-delay-ms", "soon"], "not a number"),
        (["--drafter-slowdown", "0.5"], "at least 1"),
        (["--drafter-slowdown", "inf"], "at least 1"),
    ],
)
def test_impossible_handicaps_are_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", *flags])
    assert says in capsys.readouterr().err


def test_the_journal_is_the_routers(parsed: Parsed) -> None:
    config = parsed("--journal", "/var/lib/outrider/journal")
    assert flags_of(local.router_args(config, "v", "d"))["journal"] == "/var/lib/outrider/journal"
    assert flags_of(serve.ray_args(config))["journal"] == "/var/lib/outrider/journal"
    assert "journal" not in flags_of(local.router_args(parsed(), "v", "d"))
