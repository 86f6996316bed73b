"""What `outrider serve` makes of its flags: arguments of the processes, or of Ray's launcher."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_drafter.__main__ import parse_args as drafter_config
from outrider_router.__main__ import parse_args as router_config
from outrider_verifier.__main__ import parse_args as verifier_config

from outrider.client.commands import main, serve
from outrider.client.commands.flags_file import read_flags
from outrider.client.local import config as local
from outrider.client.local.cluster import LocalCluster
from outrider.client.local.model_files import ModelFiles
from outrider.client.local.process_flags import router_args
from outrider.client.local.readiness import check_ports_free
from outrider.errors import FailedPreconditionError, InvalidRequestError
from tests.unit.client.flags import drafter_arguments, flags_of, verifier_arguments

Parsed = Callable[..., local.LocalFleetConfig]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    """The configuration that flags mean, of a model that is there."""
    files = ModelFiles(path=Path("/models/tiny"), name="tiny", head=Path("/heads/tiny"))
    monkeypatch.setattr(serve, "find_model", lambda *_, **__: files)

    def parse(*flags: str) -> local.LocalFleetConfig:
        return serve.make_config(main.make_parser().parse_args(["serve", *flags]))

    return parse


def test_look_ahead_is_a_default_of_the_routers(parsed: Parsed) -> None:
    router = flags_of(router_args(parsed("--look-ahead", "0", "--fan-out", "8"), ["v"], ["d"]))
    assert (router["look-ahead"], router["fan-out"]) == ("0", "8")
    router = flags_of(router_args(parsed("--look-ahead", "auto"), ["v"], ["d"]))
    assert "look-ahead" not in router and "fan-out" not in router
    ray = flags_of(serve.ray_args(parsed("--look-ahead", "1")))
    assert ray["look-ahead"] == "1" and "fan-out" not in ray


@pytest.mark.parametrize(
    ("methods", "default"), [("ngram", "ngram"), ("ngram,eagle3", None), ("none", None)]
)
def test_requests_that_name_no_method_get_one_that_is_offered(
    parsed: Parsed, methods: str, default: str | None
) -> None:
    args = router_args(parsed("--drafter-methods", methods), ["v"], ["d"])
    assert flags_of(args).get("method") == default
    assert router_config(["--model", "m", "--verifier", "v", *args]).speculation.method == (
        default or "eagle3"
    )


def test_hooks_reach_the_processes_of_their_kind(parsed: Parsed) -> None:
    config = parsed(
        *("--drafter-hook", "mine.slow:factor=2,why=test", "--drafter-hook", "mine.told"),
        *("--verifier-hook", "mine.paced:ms=.5"),
    )
    drafter, verifier = drafter_arguments(config), verifier_arguments(config)
    hooks = [value for flag, value in itertools.pairwise(drafter) if flag == "--hook"]
    assert hooks == ["mine.slow:factor=2,why=test", "mine.told"]
    assert drafter_config(drafter).hooks == tuple(hooks)
    assert flags_of(verifier)["hook"] == "mine.paced:ms=.5"
    assert verifier_config(verifier).hooks == ("mine.paced:ms=.5",)
    assert "--hook" not in [*drafter_arguments(parsed()), *verifier_arguments(parsed())]


def test_a_file_lists_hooks(parsed: Parsed, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('drafter-hook = ["a.b:x=1,y=2", "c"]\nverifier-hook = "d:z=3"\n')
    config = parsed(*read_flags(file, serve.add_arguments))
    assert config.drafter_hooks == ("a.b:x=1,y=2", "c")
    assert config.verifier_hooks == ("d:z=3",)


def test_both_sides_of_the_exchange_leave_a_timeline(parsed: Parsed) -> None:
    config = parsed("--trace-dir", "/traces")
    assert flags_of(drafter_arguments(config))["trace-file"] == "/traces/drafter-0.json"
    assert flags_of(verifier_arguments(config))["trace-file"] == "/traces/verifier-0.json"
    assert "--trace-file" not in verifier_arguments(parsed())


@pytest.mark.parametrize(
    "flags",
    [("--verifier-hook", "mine"), ("--drafter-hook", "mine"), ("--trace-dir", "/traces")],
)
def test_ray_refuses_what_only_processes_have(parsed: Parsed, flags: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=flags[0]):
        serve.ray_args(parsed(*flags))


def test_the_key_file_is_passed_on_to_ray_and_a_folder_of_certificates_is_not(
    parsed: Parsed, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    config = parsed("--api-keys", str(keys))
    assert flags_of(serve.ray_args(config))["api-keys"] == str(keys)
    with pytest.raises(InvalidRequestError, match=r"router\.client_api_tls"):
        serve.ray_args(replace(parsed(), tls_dir=tmp_path))


def test_the_journal_is_the_routers(parsed: Parsed) -> None:
    config = parsed("--journal", "/var/lib/outrider/journal")
    assert flags_of(router_args(config, ["v"], ["d"]))["journal"] == "/var/lib/outrider/journal"
    assert flags_of(serve.ray_args(config))["journal"] == "/var/lib/outrider/journal"
    assert "journal" not in flags_of(router_args(parsed(), ["v"], ["d"]))


def test_running_requests_get_as_long_as_is_said(parsed: Parsed) -> None:
    assert flags_of(router_args(parsed(), ["v"], ["d"]))["drain-timeout-s"] == "30.0"
    config = parsed("--drain-timeout-s", "2")
    assert flags_of(router_args(config, ["v"], ["d"]))["drain-timeout-s"] == "2.0"
    assert flags_of(serve.ray_args(config))["drain-timeout-s"] == "2.0"


def test_so_many_processes_are_started_by_either_runtime(parsed: Parsed) -> None:
    config = parsed("--verifiers", "2", "--drafters", "3")
    assert (config.verifiers, config.drafters) == (2, 3)
    ray = flags_of(serve.ray_args(config))
    assert (ray["verifiers"], ray["drafters"]) == ("2", "3")
    with pytest.raises(InvalidRequestError, match="at least 1, got 0 and 3"):
        replace(config, verifiers=0)


def test_several_routers_are_processes(parsed: Parsed) -> None:
    config = parsed("--routers", "4")
    assert config.routers == 4
    with pytest.raises(InvalidRequestError, match="--routers needs --runtime processes"):
        serve.ray_args(config)
    with pytest.raises(InvalidRequestError, match="at least 1 and at most 8, got 0"):
        replace(config, routers=0)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--http", "nonsense"], "http must be HOST:PORT, got 'nonsense'"),
        (["--http", "localhost:http"], "http must be HOST:PORT"),
        (["--port", "70000"], "listen must be HOST:PORT, got '127.0.0.1:70000'"),
        (["--api-keys", "/nowhere/keys.toml"], "API key file /nowhere/keys.toml does not exist"),
    ],
)
def test_what_only_the_router_needs_is_checked_before_anything_starts(
    parsed: Parsed, flags: list[str], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parsed(*flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--head-revision", "v1"], "--head-revision needs a --head from the hub"),
        (["--draft-model-revision", "v1"], "--draft-model-revision needs a --draft-model from"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--served-model-name", " "], "--served-model-name must not be empty"),
    ],
)
def test_flags_that_nothing_would_use_are_refused(
    parsed: Parsed, flags: list[str], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        parsed(*flags)
    assert caught.value.reason == "INVALID_FLAG"


def test_a_port_that_is_taken_is_said_before_anything_starts(parsed: Parsed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = LocalCluster(parsed("--port", str(port)))
        with pytest.raises(FailedPreconditionError, match="cannot listen"):
            cluster.start()
    assert not cluster.members


def test_several_routers_do_not_join_another_fleets_at_their_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPreconditionError, match=f"cannot listen on {address}") as caught:
            check_ports_free(address, None)
    assert caught.value.reason == "ADDRESS_IN_USE"
    check_ports_free(address, None)
    check_ports_free("127.0.0.1:0", address)


def test_options_named_as_elsewhere_reach_the_processes(parsed: Parsed) -> None:
    config = parsed("--served-model-name", "mine", "--max-model-len", "512", "--log-level", "debug")
    router = flags_of(router_args(config, ["v"], ["d"]))
    verifier, drafter = flags_of(verifier_arguments(config)), flags_of(drafter_arguments(config))
    assert router["model-name"] == "mine"
    assert verifier["max-context-len"] == "512"
    assert {each["log-level"] for each in (router, verifier, drafter)} == {"DEBUG"}
    usual = flags_of(router_args(parsed(), ["v"], ["d"]))
    assert usual["model-name"] == "tiny" and "log-level" not in usual
    assert flags_of(serve.ray_args(parsed("--served-model-name", "mine")))["model-name"] == "mine"
    with pytest.raises(InvalidRequestError, match="--max-model-len"):
        serve.ray_args(config)


def test_the_share_of_a_gpu_is_said_for_each_verifier(parsed: Parsed) -> None:
    config = parsed("--device", "cuda", "--gpu-memory-utilization", "0.5")
    assert flags_of(verifier_arguments(config, gpus=1))["memory-fraction"] == "0.5"
    assert flags_of(verifier_arguments(config, gpus=2))["memory-fraction"] == "0.5"
    with pytest.raises(InvalidRequestError, match="needs --device cuda"):
        parsed("--gpu-memory-utilization", "0.5")
    with pytest.raises(SystemExit):
        parsed("--device", "cuda", "--gpu-memory-utilization", "1.5")
