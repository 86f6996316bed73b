"""`python -m outrider_ray` with a tiny random model: verifier and drafter as Ray actors."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outrider_ray.actor_keeper import MAX_PAUSE_S, MIN_BACKOFF_S, MIN_STABLE_S, next_pause
from outrider_ray.cluster import LocalProcess, descendants
from outrider_ray.config import RayFleetConfig, drafter_config, verifier_config

from outrider.client import (
    CancelledRequestError,
    Client,
    RetryPolicy,
    user,
)
from outrider.errors import InvalidRequestError, UnauthenticatedError
from outrider.spec.plan import DraftMethod
from outrider.transport.tls import CertificateRole, TlsConfig
from tests.fakes.certificates import Authority
from tests.integration.ray_nodes import free_port
from tests.integration.stack import Process
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
STOP_S = 30.0
"""More than a stop may take: bounded steps of the launcher, then its grace for Ray."""
RESTART_S = 120.0
LONG = 1500


class Launcher(Process):
    """The launcher's process, and what it says of its actors."""

    start_timeout_s = 200.0
    """Ray's own start takes a multiple of its ten seconds on a machine with other work."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._log_file = directory / "ray.log"
        super().__init__("ray", "outrider_ray", list(arguments), self._log_file)

    def actors(self, name: str) -> list[int]:
        """Process ids of an actor and its replacements, oldest first."""
        lines = self._log_file.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        ready = [r for r in records if r["event"] == "actor started" and r["actor"] == name]
        return [record["pid"] for record in ready]

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGTERM)
        return self._popen.wait(timeout=STOP_S)


@pytest.fixture(scope="module")
def launcher(
    tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launcher]:
    # The drafts of a random head never pay: they are to be made all the same.
    arguments = ["--model", str(tiny_target), "--head", str(tiny_head), "--threads", "1"]
    arguments += ["--planner", "fixed"]
    process = Launcher(tmp_path_factory.mktemp("ray"), *arguments, "--metrics-port", "0")
    try:
        process.start().wait_ready()
        yield process
    finally:
        process.stop()


@pytest.fixture
def client(launcher: Launcher) -> Iterator[Client]:
    with Client(launcher.address, timeout_s=60.0, retry=RetryPolicy(max_attempts=1)) as connected:
        yield connected


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}],
    ids=["greedy", "coupled"],
)
def test_text_is_the_same_with_and_without_a_drafter(
    client: Client, sampling: dict[str, object]
) -> None:
    plain = client.generate(PROMPT, max_tokens=64, ignore_eos=True, drafter="none", **sampling)  # type: ignore[arg-type]
    drafted = client.generate(
        PROMPT,
        max_tokens=64,
        ignore_eos=True,
        drafter="eagle3",
        draft_tokens=4,
        **sampling,  # type: ignore[arg-type]
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert plain.finish.stats.proposed == 0
    assert drafted.finish.stats.proposed > 0


def test_streamed_text_equals_the_unary_answer(client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=48, ignore_eos=True, seed=5, temperature=0.7)
    with client.stream(PROMPT, max_tokens=48, ignore_eos=True, seed=5, temperature=0.7) as stream:
        deltas = list(stream)
    assert len(deltas) > 1
    assert "".join(delta.text for delta in deltas) == whole.text
    ids = tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
    assert ids == whole.token_ids


def test_a_cancelled_request_frees_the_verifier(client: Client) -> None:
    options = {"max_tokens": LONG, "ignore_eos": True, "request_id": "to-abort"}
    with client.stream(PROMPT, **options) as stream:  # type: ignore[arg-type]
        next(iter(stream))
        assert client.abort(["to-abort"]) == ("to-abort",)
        with pytest.raises(CancelledRequestError):
            for _ in stream:
                pass
    wait_until(lambda: _idle(client), what="freed verifier")


def test_a_dead_drafter_changes_no_token_and_is_replaced(
    client: Client, launcher: Launcher
) -> None:
    plain = client.generate(
        PROMPT, max_tokens=400, ignore_eos=True, temperature=0.0, drafter="none"
    )
    first = launcher.actors("drafter-0")
    ids: list[int] = []
    with client.stream(
        PROMPT, max_tokens=400, ignore_eos=True, temperature=0.0, draft_tokens=4
    ) as stream:
        for delta in stream:
            if not ids:
                os.kill(first[-1], signal.SIGKILL)
            ids += delta.token_ids
    assert tuple(ids) == plain.token_ids
    assert stream.finish is not None
    assert stream.finish.stats.fallback_rounds > 0
    _wait_for_replacement(launcher, "drafter-0", len(first))
    wait_until(lambda: _proposed(client) > 0, timeout_s=RESTART_S, what="drafts of the new one")


def test_a_dead_verifier_is_replaced_and_drafted_for(client: Client, launcher: Launcher) -> None:
    plain = client.generate(PROMPT, max_tokens=32, ignore_eos=True, temperature=0.0)
    first = launcher.actors("verifier-0")
    with client.stream(PROMPT, max_tokens=64, ignore_eos=True, temperature=0.0) as stream:
        for number, _ in enumerate(stream):
            if number == 0:
                os.kill(first[-1], signal.SIGKILL)
        # It goes on with the next one.
        assert stream.result().token_ids[:32] == plain.token_ids
    _wait_for_replacement(launcher, "verifier-0", len(first))
    wait_until(lambda: _healthy(client), timeout_s=RESTART_S, what="a healthy fleet")
    again = client.generate(PROMPT, max_tokens=32, ignore_eos=True, temperature=0.0)
    assert again.token_ids == plain.token_ids
    wait_until(lambda: _proposed(client) > 0, timeout_s=RESTART_S, what="drafts for the new one")


def test_sigterm_ends_every_process_while_a_request_runs(
    client: Client, launcher: Launcher
) -> None:
    processes = [LocalProcess(launcher.pid), *descendants(launcher.pid)]
    actors = {launcher.actors(name)[-1] for name in ("verifier-0", "drafter-0")}
    assert actors <= {process.pid for process in processes}
    with client.stream(PROMPT, max_tokens=LONG, ignore_eos=True) as stream:
        next(iter(stream))
        assert launcher.terminate() == 0
    wait_until(lambda: not any(process.alive for process in processes), what="their end")


AUTOSCALE = """
[autoscale]
max_drafters = 2
sessions_per_drafter = 1
up_after_s = 0.2
down_after_s = 0.5
cool_down_s = 0.5
look_s = 0.1
"""


def test_a_pool_follows_its_load_and_all_actors_end_with_a_killed_launcher(
    tiny_target: Path, tmp_path: Path
) -> None:
    config = tmp_path / "ray.toml"
    config.write_text(AUTOSCALE)
    # By actor calls, so that these are seen at work with a router and drafters, too.
    arguments = ["--config", str(config), "--methods", "ngram", "--exchange", "refs"]
    arguments += [
        "--planner",
        "fixed",
        "--threads",
        "1",
        "--verifiers",
        "1",
        "--drain-timeout-s",
        "1",
    ]
    process = Launcher(tmp_path, "--model", str(tiny_target), *arguments)
    try:
        process.start().wait_ready()
        with Client(process.address, timeout_s=60.0) as client:
            plain = client.generate(PROMPT, max_tokens=64, ignore_eos=True, drafter="none")
            _load_until(client, lambda: len(_drafters(client)) == 2)
            assert process.actors("drafter-1")
            again = client.generate(PROMPT, max_tokens=64, ignore_eos=True, drafter="ngram")
            assert again.token_ids == plain.token_ids
            wait_until(lambda: len(_drafters(client)) == 1, timeout_s=STOP_S, what="a small pool")
        names = ("verifier-0", "drafter-0")
        actors = [LocalProcess(process.actors(name)[0]) for name in names]
        assert all(actor.alive for actor in actors)
        process.kill()
        wait_until(
            lambda: not any(actor.alive for actor in actors), timeout_s=STOP_S, what="their end"
        )
    finally:
        process.stop()


def test_clients_need_a_key_over_tls_and_actors_have_metrics(
    tiny_target: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    certificate = authority.role(CertificateRole.ROUTER)
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.mine]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    metrics_port = free_port() & ~1
    arguments = ["--model", str(tiny_target), "--methods", "ngram", "--threads", "1"]
    arguments += ["--member-metrics-port", str(metrics_port), "--api-keys", str(keys)]
    config = tmp_path / "ray.toml"
    config.write_text(
        f'[router.client_api_tls]\ncert = "{certificate.cert}"\nkey = "{certificate.key}"\n'
    )
    arguments += ["--config", str(config)]
    process = Launcher(tmp_path, *arguments)
    tls = TlsConfig(ca=authority.ca)
    retry = RetryPolicy(max_attempts=1)
    try:
        process.start().wait_ready()
        with (
            Client(process.address, timeout_s=60.0, retry=retry, tls=tls) as stranger,
            pytest.raises(UnauthenticatedError),
        ):
            stranger.generate(PROMPT, max_tokens=8)
        with Client(
            process.address, timeout_s=60.0, retry=retry, tls=tls, api_key="secret"
        ) as client:
            result = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8
        for port, name in ((metrics_port, "outrider_verifier"), (metrics_port + 1, "drafter")):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30.0) as page:
                assert name in page.read().decode()
    finally:
        process.stop()


def test_a_draft_model_that_does_not_load_is_named_and_ray_is_stopped(
    tiny_target: Path, tmp_path: Path
) -> None:
    arguments = ["--model", str(tiny_target), "--methods", "model", "--threads", "1"]
    process = Launcher(tmp_path, *arguments, "--draft-model", str(tmp_path))
    process.start()
    assert process._popen is not None
    try:
        assert process._popen.wait(timeout=Launcher.start_timeout_s) == 2
        report = json.loads((tmp_path / "ray.log").read_text().splitlines()[-1])
        assert report["event"] == "failed"
        assert str(tmp_path) in report["reason"]
    except subprocess.TimeoutExpired:
        pytest.fail("the launcher did not give up")
    finally:
        process.stop()


def test_pauses_grow_while_an_actor_keeps_dying() -> None:
    pause_s = next_pause(MIN_BACKOFF_S, ran_s=1.0)
    assert pause_s == 2 * MIN_BACKOFF_S
    for _ in range(20):
        pause_s = next_pause(pause_s, ran_s=1.0)
    assert pause_s == MAX_PAUSE_S
    assert next_pause(pause_s, ran_s=MIN_STABLE_S + 1.0) == MIN_BACKOFF_S


def test_threads_of_an_actor_are_those_that_ray_reserves_for_it() -> None:
    assert verifier_config(RayFleetConfig(model="m", cpus_per_actor=4.0)).threads == 4
    assert verifier_config(RayFleetConfig(model="m", cpus_per_actor=4.0, threads=2)).threads == 2


def test_the_head_is_used_only_by_methods_that_need_it() -> None:
    methods = (DraftMethod.NGRAM,)
    config = RayFleetConfig(model="m", head="h", methods=methods)
    drafter = drafter_config(config)
    assert drafter is not None
    assert (drafter.methods, drafter.head) == (methods, "")
    assert verifier_config(config).feature_head == ""
    assert drafter_config(RayFleetConfig(model="m", methods=(DraftMethod.NONE,))) is None


def test_a_head_in_the_verifier_needs_no_drafter() -> None:
    config = RayFleetConfig(
        model="m",
        head="h",
        placement="fused",
        draft_length=5,
        gpus_per_actor=1.0,
        cuda_graphs=False,
    )
    verifier = verifier_config(config)
    assert (verifier.placement, verifier.draft_length, verifier.device) == ("fused", 5, "cuda:0")
    assert (verifier.feature_head, verifier.cuda_graphs) == ("h", False)
    drafter = drafter_config(config)
    assert drafter is not None
    assert (drafter.methods, drafter.head) == ((DraftMethod.NGRAM,), "")
    alone = RayFleetConfig(
        model="m", head="h", methods=(DraftMethod.EAGLE3,), placement="colocated"
    )
    assert drafter_config(alone) is None


def test_a_method_without_its_head_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="head"):
        drafter_config(RayFleetConfig(model="m", methods=(DraftMethod.EAGLE3,)))


def _wait_for_replacement(launcher: Launcher, name: str, known: int) -> None:
    wait_until(lambda: len(launcher.actors(name)) > known, timeout_s=RESTART_S, what=f"new {name}")


def _proposed(client: Client) -> int:
    result = client.generate(PROMPT, max_tokens=8, ignore_eos=True, drafter="eagle3")
    return result.finish.stats.proposed


def _load_until(client: Client, condition: Callable[[], bool]) -> None:
    """Keep one session running until something holds."""
    options = {"max_tokens": LONG, "ignore_eos": True, "drafter": "ngram"}
    deadline = time.monotonic() + RESTART_S
    while not condition():
        assert time.monotonic() < deadline, "the pool does not grow"
        with client.stream(PROMPT, **options) as stream:  # type: ignore[arg-type]
            for _ in stream:
                if condition():
                    return


def _drafters(client: Client) -> tuple[str, ...]:
    return tuple(drafter.drafter_id for drafter in client.server_info().drafters)


def _healthy(client: Client) -> bool:
    info = client.server_info()
    return all(v.healthy for v in info.verifiers) and all(d.healthy for d in info.drafters)


def _idle(client: Client) -> bool:
    info = client.server_info()
    return info.running == 0 and all(
        v.sessions == 0 and v.kv_free_blocks == v.kv_total_blocks for v in info.verifiers
    )
