"""`python -m outrider_ray` joins a running cluster of two nodes, and leaves it as it was."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, user
from outrider.client.local import LocalCluster, LocalConfig
from tests.integration.stack import Process, wait_until

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
STOP_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster: two nodes of two CPUs, the first with one (pretended) GPU."""
    # Sockets lie below it, whose paths must be short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as nodes:
        nodes.callback(shutil.rmtree, directory, ignore_errors=True)
        patch.setenv("RAY_TMPDIR", directory)
        # Else the first start writes a token into the home folder.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        head = ("--head", f"--port={port}", "--include-dashboard=false")
        nodes.enter_context(node(*head, "--num-gpus=1"))
        wait_until(lambda: _listens(port), timeout_s=30.0, what="head of the cluster")
        nodes.enter_context(node(f"--address=127.0.0.1:{port}", "--num-gpus=0"))
        yield f"127.0.0.1:{port}"


@contextmanager
def node(*arguments: str) -> Generator[None]:
    """A node of a cluster, until the end of the context."""
    command = [Path(sys.executable).parent / "ray", "start", "--block", "--num-cpus=2"]
    options = ["--object-store-memory=100000000"]
    process = subprocess.Popen(
        [*command, *arguments, *options], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_actors_of_a_joined_cluster_take_places_apart_and_answer_like_processes(
    cluster: str, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    with LocalCluster(LocalConfig(model=tiny_target, methods=(), threads=1)) as processes:
        plain, _ = _answer(processes.address, "none")
    arguments = ["--model", str(tiny_target), "--head", str(tiny_head), "--threads", "1"]
    arguments += ["--planner", "fixed", "--ray-address", cluster, "--exchange", "refs"]
    arguments += ["--strategy", "strict-spread", "--cpus-per-actor", "1"]
    launcher = Process("ray", "outrider_ray", arguments, tmp_path / "ray.log")
    try:
        launcher.start().wait_ready()
        answer, proposed = _answer(launcher.address, "eagle3")
        assert (answer, proposed > 0) == (plain, True)
        found = _probe(cluster, "share")
    finally:
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher._popen is not None
        status = launcher._popen.wait(STOP_S)
        launcher.stop()
    (group,) = found["groups"]
    assert (group["strategy"], group["state"]) == ("STRICT_SPREAD", "CREATED")
    assert group["bundles"] == {"0": {"CPU": 1.0}, "1": {"CPU": 1.0}}
    assert len(set(group["bundles_to_node_id"].values())) == 2
    # One GPU for two actors: half of it each, on its node.
    assert found["shared"]["bundles"] == {"0": {"GPU": 0.5}, "1": {"GPU": 0.5}}
    assert len(set(found["shared"]["bundles_to_node_id"].values())) == 1
    assert status == 0
    after = _probe(cluster)
    assert (after["groups"], after["actors"]) == ([], [])


def _answer(address: str, drafter: str) -> tuple[tuple[int, ...], int]:
    """Token ids of an answer, and how many tokens were proposed for it."""
    with Client(address, timeout_s=60.0) as client:
        result = client.generate(
            PROMPT, max_tokens=64, ignore_eos=True, temperature=0.0, drafter=drafter
        )
    return result.token_ids, result.finish.stats.proposed


def _probe(cluster: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.ray_probe", cluster, *arguments]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60.0, check=True)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
