"""The fleet follows the plan of its pools, and the router hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from outrider_ray.autoscale import AutoscaleConfig, Create, Drain
from outrider_ray.config import RayFleetConfig
from outrider_ray.members import FleetMember, MemberRole
from outrider_ray.scaler import FleetScaler, drafter_load, verifier_load
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.peers import DrafterPeer, VerifierPeer

from outrider.errors import UnavailableError
from outrider.spec.plan import DraftMethod

AUTOSCALE = AutoscaleConfig(
    max_verifiers=2, max_drafters=2, up_after_s=1.0, down_after_s=1.0, cool_down_s=1.0
)
CONFIG = RayFleetConfig(model="m", methods=(DraftMethod.NGRAM,), autoscale=AUTOSCALE)
SECOND = FleetMember(MemberRole.VERIFIER, 1)
SECOND_DRAFTER = FleetMember(MemberRole.DRAFTER, 1)


def verifier_info(**values: Any) -> Any:
    known = {"sessions": 0, "max_sessions": 10, "kv_free_blocks": 100, "kv_total_blocks": 100}
    return SimpleNamespace(**(known | values))


def drafter_info(**values: Any) -> Any:
    return SimpleNamespace(**({"sessions": 0, "max_sessions": 0} | values))


@dataclass
class FakeFleet:
    """Members that come and go at once."""

    calls: list[str] = field(default_factory=list)
    room: bool = True

    def __post_init__(self) -> None:
        self.members: dict[FleetMember, None] = dict.fromkeys(CONFIG.members)

    async def add(self, member: FleetMember) -> None:
        if not self.room:
            raise UnavailableError("no places", reason="NO_PLACES")
        self.calls.append(f"add {member.name}")
        self.members[member] = None

    async def remove(self, member: FleetMember, drain_timeout_s: float) -> None:
        self.calls.append(f"remove {member.name}")
        del self.members[member]


class FakeRouter:
    """What a scaler asks of a router."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.admission = SimpleNamespace(num_waiting=0)
        self.verifiers: dict[str, VerifierPeer] = {}
        self.drafters: dict[str, DrafterPeer] = {}
        self.registry = self
        self.mover = self
        for member in CONFIG.members:
            (self.add_verifier if member.role is MemberRole.VERIFIER else self.add_drafter)(
                member.name
            )
        calls.clear()

    def add_verifier(self, address: str) -> None:
        self.calls.append(f"tell of {address}")
        self.verifiers[address] = VerifierPeer(
            address=address, state=PeerState.HEALTHY, info=verifier_info()
        )

    def add_drafter(self, address: str) -> None:
        self.calls.append(f"tell of {address}")
        self.drafters[address] = DrafterPeer(
            address=address, state=PeerState.HEALTHY, info=drafter_info()
        )

    async def forget_verifier(self, peer: VerifierPeer) -> None:
        self.calls.append(f"forget {peer.address}")
        del self.verifiers[peer.address]

    async def forget_drafter(self, peer: DrafterPeer) -> None:
        self.calls.append(f"forget {peer.address}")
        del self.drafters[peer.address]

    async def drain_drafter(self, peer: DrafterPeer, timeout_s: float) -> None:
        self.calls.append(f"empty {peer.address}")


class Rig:
    """A scaler, its fleet and its router."""

    def __init__(self) -> None:
        self.fleet = FakeFleet()
        self.router = FakeRouter(self.fleet.calls)
        fleet: Any = self.fleet
        service: Any = self.router
        self.scaler = FleetScaler(CONFIG, fleet, service)
        self.now = 0.0

    async def look(self) -> tuple[object, ...]:
        """A look two seconds later, and what it begins."""
        self.now += 2.0
        begun = self.scaler.look(self.now)
        for _ in range(10):
            await asyncio.sleep(0)
        return begun


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig()
    monkeypatch.setattr("outrider_ray.scaler.time.monotonic", lambda: made.now)
    yield made


async def test_a_queue_brings_a_verifier_of_which_the_router_hears_once_it_is_there(
    rig: Rig,
) -> None:
    rig.router.admission.num_waiting = 50
    assert await rig.look() == ()
    assert await rig.look() == (Create(SECOND),)
    assert rig.fleet.calls == ["add verifier-1", "tell of verifier-1"]


async def test_an_idle_verifier_hands_over_before_the_router_forgets_it(rig: Rig) -> None:
    rig.fleet.members[SECOND] = None
    rig.router.add_verifier(SECOND.name)
    rig.fleet.calls.clear()
    assert await rig.look() == ()
    assert await rig.look() == (Drain(SECOND),)
    assert rig.fleet.calls == ["remove verifier-1", "forget verifier-1"]


async def test_a_full_drafter_gets_help_and_an_idle_one_is_emptied_first(rig: Rig) -> None:
    rig.router.drafters["drafter-0"].info = drafter_info(sessions=9, max_sessions=10)
    await rig.look()
    assert await rig.look() == (Create(SECOND_DRAFTER),)
    rig.router.drafters["drafter-0"].info = drafter_info(sessions=1, max_sessions=10)
    await rig.look()
    assert await rig.look() == (Drain(SECOND_DRAFTER),)
    assert rig.fleet.calls == [
        "add drafter-1",
        "tell of drafter-1",
        "empty drafter-1",
        "forget drafter-1",
        "remove drafter-1",
    ]


async def test_a_cluster_without_room_is_asked_again_after_the_cool_down(rig: Rig) -> None:
    rig.router.admission.num_waiting, rig.fleet.room = 50, False
    await rig.look()
    assert await rig.look() == (Create(SECOND),)
    assert rig.fleet.calls == []
    rig.fleet.room = True
    await rig.look()
    assert await rig.look() == (Create(SECOND),)
    assert SECOND in rig.fleet.members


def test_a_verifiers_load_is_its_scarcer_resource() -> None:
    member = FleetMember(MemberRole.VERIFIER, 0)

    def load(**values: Any) -> float:
        info = verifier_info(**values)
        peer = VerifierPeer(address="v", state=PeerState.HEALTHY, info=info)
        return verifier_load(member, peer).load

    assert load(sessions=5) == 0.5
    assert load(sessions=5, kv_free_blocks=10) == pytest.approx(0.9)
    assert not verifier_load(member, None).ready
    lost = VerifierPeer(address="v", state=PeerState.LOST, info=verifier_info())
    assert not verifier_load(member, lost).ready


@pytest.mark.parametrize(("takes", "load"), [(0, 0.5), (1024, 0.5), (40, 0.8)])
def test_a_drafter_is_full_by_the_setting_or_sooner(takes: int, load: float) -> None:
    info = drafter_info(sessions=32, max_sessions=takes)
    peer = DrafterPeer(address="d", state=PeerState.HEALTHY, info=info)
    config = AutoscaleConfig(sessions_per_drafter=64)
    assert drafter_load(SECOND_DRAFTER, peer, config).load == load
