"""A detached fleet on three nodes: placed as asked, and there after nodes, links and its
supervisor were lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from outrider_ray.supervisor import SERVING

from outrider.client import Client, RetryPolicy, UnavailableError, user
from tests.integration.ray_nodes import Nodes, free_port, three_nodes
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

PROMPT = [user("Count: 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5")]
HEAL_S = 120.0
"""A node is given up, comes back, and its actor loads a model; on a machine with other work."""
COMMAND_S = 120.0
LONG = 700
"""Tokens of a stream in whose course something is lost."""


@dataclass(frozen=True)
class DetachedFleet:
    """Two verifiers and a drafter, each on a node of its own, whose launcher has gone."""

    nodes: Nodes
    address: str
    """Of its clients."""

    def status(self) -> dict[str, Any]:
        """What `outrider ray status` says."""
        said = command("status", "--ray-address", self.nodes.address, "--json")
        found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
        return found

    def drafts(self) -> bool:
        """Whether all verifiers are healthy, and the drafter drafts."""
        try:
            with connect(self.address) as client:
                verifiers = client.server_info().verifiers
                return all(v.healthy for v in verifiers) and answer(client, 8).drafted > 0
        except UnavailableError:
            return False


@dataclass(frozen=True)
class Answer:
    """The end of a request."""

    token_ids: tuple[int, ...]
    drafted: int
    """Tokens that were proposed for it."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with three_nodes() as up:
        yield up


@pytest.fixture(scope="module")
def fleet(nodes: Nodes, tiny_target: Path, tiny_head: Path) -> DetachedFleet:
    arguments = ["--model", str(tiny_target), "--head", str(tiny_head), "--threads", "1"]
    # The drafts of a random head never pay: they are to be made all the same.
    arguments += ["--planner", "fixed", "--verifiers", "2", "--detached", "--metrics-port", "0"]
    arguments += ["--listen", f"0.0.0.0:{free_port()}", "--strategy", "strict-spread"]
    arguments += ["--cpus-per-actor", "1", "--verifier-resource", "verifying"]
    arguments += ["--drafter-resource", "drafting"]
    launched = command("--ray-address", nodes.address, *arguments)
    return DetachedFleet(nodes, json.loads(launched.stdout.splitlines()[-1])["address"])


def test_a_cell_takes_places_apart_and_the_fleet_outlives_its_launcher(
    fleet: DetachedFleet,
) -> None:
    found = probe(fleet.nodes.address, "share")
    groups = {group["name"]: group for group in found["groups"]}
    assert set(groups) == {"outrider-verifier-0", "outrider-verifier-1"}
    assert {group["strategy"] for group in groups.values()} == {"STRICT_SPREAD"}
    cell = groups["outrider-verifier-0"]
    assert cell["bundles"] == {
        "0": {"CPU": 1.0, "verifying": 1.0},
        "1": {"CPU": 1.0, "drafting": 1.0},
    }
    places = [node for group in groups.values() for node in group["bundles_to_node_id"].values()]
    assert len(set(places)) == 3
    status = fleet.status()
    assert (status["state"], status["address"]) == (SERVING, fleet.address)
    assert all(pids(status).values())
    with connect(fleet.address) as client:
        plain, drafted = answer(client, 48, drafter="none"), answer(client, 48)
    assert drafted.token_ids == plain.token_ids
    assert drafted.drafted > plain.drafted == 0
    # One GPU for two actors of another fleet: half of it each, on its node.
    assert found["shared"]["bundles"] == {"0": {"GPU": 0.5}, "1": {"GPU": 0.5}}
    assert len(set(found["shared"]["bundles_to_node_id"].values())) == 1


def test_a_node_that_was_cut_off_joins_again_and_drafts_again(fleet: DetachedFleet) -> None:
    link, starts = fleet.nodes.link, fleet.nodes.third.starts
    if link is None:
        pytest.skip("network namespaces need CAP_NET_ADMIN and CAP_SYS_ADMIN")
    before = pids(fleet.status())
    with connect(fleet.address) as client:
        plain = answer(client, LONG, drafter="none")
        assert streamed(client, link.cut) == plain.token_ids
    # A node that is still given a chance would go on as if nothing had been.
    wait_until(
        lambda: pids(fleet.status())["drafter-0"] == 0, timeout_s=HEAL_S, what="a node given up"
    )
    link.heal()
    fleet.nodes.third.wait(starts + 1)
    wait_until(fleet.drafts, timeout_s=HEAL_S, what="drafts of the node that came back")
    after = pids(fleet.status())
    changed = {name for name, pid in after.items() if pid != before[name]}
    assert changed == {"drafter-0"}


def test_a_killed_supervisor_finds_its_fleet_again(fleet: DetachedFleet) -> None:
    before = fleet.status()
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(fleet.drafts, timeout_s=HEAL_S, what="a supervisor that serves")
    after = fleet.status()
    assert after["restarted"] and after["pid"] != before["pid"]
    assert pids(after) == pids(before)


def test_a_drafters_node_that_dies_changes_no_token(fleet: DetachedFleet) -> None:
    with connect(fleet.address) as client:
        plain = answer(client, LONG, drafter="none")
        assert streamed(client, fleet.nodes.third.kill) == plain.token_ids


def test_text_goes_on_elsewhere_when_a_verifiers_node_dies(fleet: DetachedFleet) -> None:
    status, second = fleet.status(), fleet.nodes.second
    assert any(second.holds(pid) for pid in pids(status).values())
    resumed = resumed_sessions(status)
    with connect(fleet.address) as client:
        plain = answer(client, LONG, drafter="none")
        # One on each verifier.
        with stream_of(client, "none") as one, stream_of(client, "none") as other:
            heard = [list(next(iter(stream)).token_ids) for stream in (one, other)]
            second.kill()
            for stream, ids in zip((one, other), heard, strict=True):
                for delta in stream:
                    ids += delta.token_ids
                assert tuple(ids) == plain.token_ids
    # More often where the machine stalls so long that the other one seems lost, too.
    assert resumed_sessions(status) >= resumed + 1
    wait_until(fleet.drafts, timeout_s=HEAL_S, what="all on nodes that came back")


def test_a_stopped_fleet_leaves_the_cluster_as_it_was_even_while_an_actor_is_made(
    fleet: DetachedFleet,
) -> None:
    # Its actor is waited for until the node is back.
    fleet.nodes.second.kill()
    wait_until(
        lambda: 0 in pids(fleet.status()).values(), timeout_s=HEAL_S, what="an actor that is missed"
    )
    command("stop", "--ray-address", fleet.nodes.address)
    after = probe(fleet.nodes.address)
    assert (after["groups"], after["actors"]) == ([], [])
    with pytest.raises(subprocess.CalledProcessError):
        fleet.status()


def connect(address: str) -> Client:
    """A client that tries once."""
    return Client(address, timeout_s=200.0, retry=RetryPolicy(max_attempts=1))


def answer(client: Client, max_tokens: int, drafter: str = "eagle3") -> Answer:
    """An answer that is asked for at once."""
    result = client.generate(
        PROMPT, max_tokens=max_tokens, ignore_eos=True, temperature=0.0, drafter=drafter
    )
    return Answer(result.token_ids, result.finish.stats.proposed)


def stream_of(client: Client, drafter: str = "eagle3") -> Any:
    """The same as a long stream."""
    options = {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.0, "drafter": drafter}
    return client.stream(PROMPT, **options)  # type: ignore[arg-type]


def streamed(client: Client, fault: Callable[[], None]) -> tuple[int, ...]:
    """The token ids of a stream in whose course something happens."""
    ids: list[int] = []
    with stream_of(client) as stream:
        for delta in stream:
            if not ids:
                fault()
            ids += delta.token_ids
    return tuple(ids)


def resumed_sessions(status: dict[str, Any]) -> float:
    """How many sessions went on with another verifier."""
    with urllib.request.urlopen(f"http://{status['metrics']}/metrics", timeout=30.0) as page:
        lines = page.read().decode().splitlines()
    name = "outrider_resumed_sessions_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def pids(status: dict[str, Any]) -> dict[str, int]:
    """Process ids by actor; 0 of one that is being made."""
    return {member["name"]: member["pid"] for member in status["members"]}


def probe(address: str, *arguments: str) -> dict[str, Any]:
    """What `ray_probe` says."""
    made = [sys.executable, "-m", "tests.integration.ray_probe", address, *arguments]
    said = subprocess.run(made, stdout=subprocess.PIPE, text=True, timeout=COMMAND_S, check=True)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`outrider ray ARGUMENTS`."""
    made = [sys.executable, "-m", "outrider_ray", *arguments]
    return subprocess.run(made, stdout=subprocess.PIPE, text=True, timeout=COMMAND_S, check=True)
