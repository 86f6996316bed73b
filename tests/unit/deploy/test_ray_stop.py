"""The actors of a detached fleet that its supervisor has left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray
import ray.util
from outrider_ray import supervisor
from outrider_ray.supervisor import fleet_status, stop_detached

from outrider.errors import NotFoundError

NAMESPACE = "here"


class Cluster:
    """What Ray knows: of each actor whether its class is still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, actors: dict[str, bool]) -> None:
        self.actors = actors
        self.lingers = False
        self.now = 0.0
        monkeypatch.setattr(ray, "get_actor", self.get)
        monkeypatch.setattr(ray, "kill", self.kill)
        monkeypatch.setattr(ray.util, "list_named_actors", self.named)
        monkeypatch.setattr(ray.util, "get_placement_group", self.no_group)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(supervisor, "time", clock)

    def get(self, name: str, namespace: str) -> str:
        if name not in self.actors:
            raise ValueError(f"no actor {name} in {namespace}")
        # As Ray does for an actor whose job has just ended.
        assert self.actors[name], "Expected str or bytes, got <class 'NoneType'>"
        return name

    def kill(self, actor: str) -> None:
        self.actors.pop(actor, None)

    def named(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"name": name, "namespace": NAMESPACE} for name in self.actors]

    def no_group(self, name: str) -> None:
        raise ValueError(name)

    def sleep(self, seconds: float) -> None:
        """What is being removed is gone afterwards."""
        self.now += seconds
        if not self.lingers:
            self.actors = {name: whole for name, whole in self.actors.items() if whole}


def test_actors_that_are_just_being_removed_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, {"verifier-0": True, "drafter-0": False})
    assert stop_detached(NAMESPACE)
    assert cluster.actors == {}


def test_an_actor_that_stays_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(monkeypatch, {"drafter-0": False})
    cluster.lingers = True
    assert not stop_detached(NAMESPACE)
    assert [record.__dict__["actors"] for record in caplog.records] == [["drafter-0"]]


def test_where_nothing_is_there_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, {})
    with pytest.raises(NotFoundError, match=NAMESPACE):
        stop_detached(NAMESPACE)


def test_a_supervisor_that_is_just_being_removed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, {"supervisor": False})
    with pytest.raises(NotFoundError, match=NAMESPACE):
        fleet_status(NAMESPACE)
