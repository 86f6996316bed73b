"""`outrider serve` with real processes over the tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from outrider.client import Client, UnavailableError, user
from outrider.client.commands import main
from tests.fakes.hub import FakeHub
from tests.integration.gap_meter import GapMeter, measure_calm
from tests.waiting import wait_until

START_S = 120.0
TOKENS = 1500
"""Of a stream that takes seconds."""


SERVE = ("outrider.client.commands.main", "serve")
HASTY = ("tests.fakes.hasty_serve",)


class Service(NamedTuple):
    """A running command."""

    address: str
    """Of its router."""
    process: subprocess.Popen[str]

    @property
    def client(self) -> Client:
        return Client(self.address, timeout_s=60.0)


@contextmanager
def serving(
    *flags: str, said: list[str] | None = None, command: Sequence[str] = SERVE
) -> Iterator[Service]:
    """The service; the command must end well when it is asked to. `said`: takes what it and its
    processes say."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with subprocess.Popen(
        [sys.executable, "-m", *command, *flags],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        assert process.stderr is not None
        said = [] if said is None else said
        # What nobody reads would fill the pipe.
        reader = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
        address = ""
        for line in process.stderr:
            said.append(line)
            if found := re.match(r"\[outrider\] ready on (\S+)", line):
                address = found.group(1)
                break
        timer.cancel()
        try:
            assert address, "".join(said)
            reader.start()
            yield Service(address, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            ended = process.wait(60)
            if address:
                reader.join(10)
        assert ended == 0


@pytest.mark.timeout(240)
def test_so_many_verifiers_and_drafters_serve_behind_one_router(
    tiny_target: Path, tiny_head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--model", str(tiny_target), "--head", str(tiny_head))
    counts = ("--verifiers", "2", "--drafters", "2")
    said: list[str] = []
    with serving(*files, *counts, "--port", "0", "--threads", "1", said=said) as service:
        with service.client as client:
            answer = client.generate([user("Name a colour.")], max_tokens=8, ignore_eos=True)
        assert len(answer.token_ids) == 8
        assert main.main(["status", "--router", service.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = sorted(line.split()[1] for line in lines[1:])
    assert names == ["drafter-0", "drafter-1", "verifier-0", "verifier-1"]
    assert not any("NOT HEALTHY" in line for line in lines)
    # Nothing to worry about has happened, at the end least of all.
    logged = [json.loads(line) for line in said if line.startswith("{")]
    assert logged and {line["level"] for line in logged} == {"info"}
    assert [line for line in said if not line.startswith(("{", "[outrider]"))] == []


@pytest.mark.timeout(240)
def test_a_running_stream_comes_to_its_end_when_all_is_told_to_stop(tiny_target: Path) -> None:
    model = ("--model", str(tiny_target), "--drafter-methods", "none", "--threads", "1")
    with serving(*model, "--port", "0", command=HASTY) as service, service.client as client:
        count = [user("Count.")]
        with client.stream(count, max_tokens=TOKENS, ignore_eos=True, resume=False) as stream:
            next(stream)
            service.process.send_signal(signal.SIGTERM)
            told = time.monotonic()
            answer = stream.result()
        assert answer.finish.reason == "length" and len(answer.token_ids) == TOKENS
        # It ran on for longer than a process that is merely closed.
        assert time.monotonic() - told > 2 * 0.3


@pytest.mark.timeout(240)
def test_a_second_signal_ends_running_streams_with_a_typed_error(tiny_target: Path) -> None:
    model = ("--model", str(tiny_target), "--drafter-methods", "none", "--threads", "1")
    with serving(*model, "--port", "0") as service, service.client as client:
        count = [user("Count.")]
        with client.stream(count, max_tokens=TOKENS, ignore_eos=True, resume=False) as stream:
            next(stream)
            service.process.send_signal(signal.SIGTERM)
            next(stream)
            time.sleep(0.3)
            service.process.send_signal(signal.SIGTERM)
            with pytest.raises(UnavailableError) as caught:
                stream.result()
        assert caught.value.reason == "SHUTDOWN"
        assert service.process.wait(60) == 0


def failed_start(*flags: str) -> list[str]:
    """The lines that `outrider serve` writes to stderr when it does not come up."""
    done = subprocess.run(
        [sys.executable, "-m", *SERVE, "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode != 0 and not done.stdout
    return done.stderr.splitlines()


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(
    tiny_target: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_target, model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (model / "config.json").write_text(json.dumps(config))
    (line,) = failed_start("--model", str(model))
    assert line.startswith("outrider: ") and "quantization_config (fp8) is not supported" in line


def test_the_last_line_of_a_verifier_that_does_not_start_is_its_reason(
    tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    # Tensors in a pickle are seen only when it is loaded.
    head = tmp_path / "head"
    shutil.copytree(tiny_head, head)
    tensors = load_file(head / "model.safetensors")
    torch.save({**tensors, "fc.weight_scale": torch.ones(1)}, head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    line = failed_start("--model", str(tiny_target), "--head", str(head), "--threads", "1")[-1]
    assert re.match(r"outrider: (verifier|drafter)-0 ended with status 2: ", line)
    assert "unexpected tensor fc.weight_scale" in line


def processes_of(model: Path, *words: str) -> list[int]:
    """Process ids of the children that serve a model and have these words in their commands."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().decode().split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if {*words, str(model)} <= set(command) and "outrider.client.local.parent_watch" in command:
            found.append(int(file.parent.name))
    return found


def routers_of(model: Path) -> list[int]:
    """Process ids of the routers of a model that share their ports."""
    return processes_of(model, "outrider_router", "--reuse-ports")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def routers_that_served(said: list[str]) -> set[str]:
    """The routers by whose logs requests have ended: sessions have names of theirs."""
    lines = [json.loads(line) for line in said if line.startswith("{")]
    ended = [line for line in lines if line.get("event") == "request ended"]
    return {line["session_id"].partition("-")[0] for line in ended}


def answer_of(service: Service) -> int:
    """Tokens of an answer to a client with a connection of its own."""
    with service.client as client:
        answer = client.generate([user("Name a colour.")], max_tokens=4, ignore_eos=True)
    return len(answer.token_ids)


@pytest.mark.timeout(240)
def test_several_routers_serve_at_one_address_and_one_that_dies_is_not_missed(
    tiny_target: Path,
) -> None:
    said: list[str] = []
    model = ("--model", str(tiny_target), "--drafter-methods", "none", "--threads", "1")
    with serving(*model, "--routers", "2", "--port", "0", said=said) as service:
        # Connections are given to either at random: all to one of them once in 2 ** 23 runs.
        assert [answer_of(service) for _ in range(24)] == [4] * 24
        served = routers_that_served(said)
        assert len(served) == 2
        routers = routers_of(tiny_target)
        assert len(routers) == 2
        os.kill(routers[0], signal.SIGKILL)
        assert [answer_of(service) for _ in range(24)] == [4] * 24
        deadline = time.monotonic() + 30.0
        while len(routers_that_served(said)) < 3 and time.monotonic() < deadline:
            answer_of(service)
        # It was started again, and is given connections once it has found the verifier.
        assert len(routers_that_served(said)) == 3


FAILOVER_S = 5.0
"""Longest pause of a stream whose verifier is stopped: the router waits 3 s for an answer."""


@pytest.mark.timeout(240)
def test_stopped_members_are_killed_and_restarted_while_streams_go_on(
    tiny_target: Path, tiny_head: Path
) -> None:
    said: list[str] = []
    http = f"127.0.0.1:{free_port()}"
    files = ("--model", str(tiny_target), "--head", str(tiny_head), "--threads", "1")
    counts = ("--verifiers", "2", "--drafters", "1", "--routers", "1", "--health-timeout-s", "3")
    with serving(*files, *counts, "--port", "0", "--http", http, said=said) as service:
        calm = measure_calm(service.address, http, seconds=2.0)
        victims = (("--verifier-id", "verifier-0"), ("--drafter-id", "drafter-0"))
        stopped = [processes_of(tiny_target, *words) for words in victims]
        assert [len(pids) for pids in stopped] == [1, 1]
        with GapMeter(service.address, http) as meter:
            time.sleep(0.5)
            for (pid,) in stopped:
                os.kill(pid, signal.SIGSTOP)
            deadline = time.monotonic() + 30.0
            while not (all_healthy(service) and restarted(said)) and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(1.0)
        assert restarted(said), said
        assert all_healthy(service)
        for words, old in zip(victims, stopped, strict=True):
            (pid,) = processes_of(tiny_target, *words)
            assert [pid] != old
        meter.gaps.assert_close_to(calm, extra_s=FAILOVER_S)
        assert meter.gaps.health_s <= calm.health_s + 1.0

        # A router has a supervisor, too: it is stopped for good without one.
        (router,) = processes_of(tiny_target, "outrider_router")
        os.kill(router, signal.SIGSTOP)
        wait_until(lambda: processes_of(tiny_target, "outrider_router") not in ([router], []))
        assert answer_of(service) == 4

        service.process.send_signal(signal.SIGHUP)
        assert service.process.wait(60) == 0


def restarted(said: list[str]) -> bool:
    """Whether verifier and drafter were killed for their silence."""
    text = "".join(said)
    return all(
        f"{name} has not answered for 3 s and was killed; starting it again" in text
        for name in ("verifier-0", "drafter-0")
    )


def all_healthy(service: Service) -> bool:
    """Whether the router says so of every verifier and drafter."""
    with service.client as client:
        info = client.server_info()
    return all(peer.healthy for peer in (*info.verifiers, *info.drafters))


@pytest.mark.timeout(240)
def test_a_model_of_the_hub_is_served_as_a_file_of_flags_says(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in tiny_target.iterdir() if file.is_file()}
    flags = tmp_path / "flags.yaml"
    flags.write_text(
        "model: me/tiny\nrevision: v1\nserved-model-name: mine\nmax-model-len: 96\n"
        "drafter-methods: none\nlog-level: warning\nthreads: 1\nport: 1\n"
    )
    said: list[str] = []
    with FakeHub({"me/tiny": {"v1": files}}).serve() as url:
        for name, value in (("ENDPOINT", url), ("HOME", str(tmp_path)), ("HUB_OFFLINE", "0")):
            monkeypatch.setenv(f"HF_{name}", value)
        monkeypatch.setenv("OUTRIDER_ROUTER_MODEL_NAME", "other")
        with serving("--config", str(flags), "--port", "0", said=said) as service:
            assert answer_of(service) == 4
            with service.client as client:
                (model,) = client.models()
    assert (model.name, model.max_context_len) == ("mine", 96)
    assert not any(line.startswith("{") for line in said)
    assert any("OUTRIDER_ROUTER_MODEL_NAME is ignored" in line for line in said)
