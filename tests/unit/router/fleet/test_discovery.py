"""Peers behind a DNS name come and go; requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.base.dns_names import ResolvedName, split_addresses
from outrider_router.config import MAX_ROUTERS, RouterConfig
from outrider_router.fleet.compatibility import PeerState
from outrider_router.fleet.discovery import PeerDiscovery, resolve
from outrider_router.requests.service import RouterService

from outrider.errors import InvalidRequestError
from outrider.ids import VerifierId
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import text_request
from tests.waiting import until


def test_names_are_told_from_addresses() -> None:
    assert split_addresses(["a:1", "dns:///v.outrider.svc:50051", "[::1]:2"]) == (
        ("a:1", "[::1]:2"),
        (("v.outrider.svc", 50051),),
    )


@pytest.mark.parametrize(
    "name", ["dns:///v", "dns:///:1", "dns:///v:0", "dns:///v:x", "dns:///a/v:1"]
)
def test_a_malformed_name_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="dns:///HOST:PORT"):
        RouterConfig(model=Path("m"), verifiers=(name,))


def test_an_address_joins_once_and_again_after_it_was_gone() -> None:
    named = ResolvedName()
    assert named.update_addresses(frozenset({"a", "b"})) == {"a", "b"}
    assert named.update_addresses(frozenset({"a", "b", "c"})) == {"c"}
    assert named.update_addresses(frozenset({"c"})) == frozenset()
    assert named.removed_addresses == {"a", "b"}
    assert named.update_addresses(frozenset({"a", "c"})) == {"a"}
    assert named.removed_addresses == {"b"}


async def test_the_systems_resolver_is_asked() -> None:
    assert await resolve("127.0.0.1", 7) == {"127.0.0.1:7"}
    assert await resolve("::1", 7) == {"[::1]:7"}


class Names:
    """A router with the verifier `s` that follows the names `v` and `d`."""

    def __init__(
        self, router: RouterService, static: FakeVerifier, dialled: dict[str, FakeVerifier]
    ) -> None:
        self.dialled = dialled
        self.router, self.registry, self.static = router, router.registry, static
        self.first, self.second = fake("v0"), fake("v1")
        self.verifiers = {"a:1": self.first, "b:1": self.second}
        self.drafter = FakeDrafter({"s": static, **self.verifiers}, name="d0")
        self.answers: dict[str, set[str] | None] = {"v": set(self.verifiers), "d": {"d0:2"}}
        self.looks = 0
        self.forgotten: list[str] = []

    async def resolve(self, host: str, port: int) -> frozenset[str]:
        self.looks += 1
        answer = self.answers[host]
        if answer is None:
            # Some names make the resolver's codec fail, which is no OSError.
            raise OSError("it is down") if host == "v" else UnicodeError("label too long")
        return frozenset(answer)

    async def forget(self, address: str) -> None:
        self.forgotten.append(address)

    async def look(self) -> None:
        """Wait until both names were looked at once more, and the peers too."""
        before = self.looks
        await until(lambda: self.looks >= before + 6)

    @property
    def known(self) -> set[str]:
        return {*self.registry.verifiers, *self.registry.drafters}

    @property
    def healthy(self) -> set[str]:
        peers = (*self.registry.verifiers.values(), *self.registry.drafters.values())
        return {peer.address for peer in peers if peer.state is PeerState.HEALTHY}


def fake(name: str) -> FakeVerifier:
    verifier = FakeVerifier(round_s=0.005)
    verifier.change_info(verifier_id=VerifierId(name))
    return verifier


@asynccontextmanager
async def following(directory: Path, **first: set[str] | None) -> AsyncGenerator[Names]:
    static = fake("s")
    verifiers, drafters = {"s": static}, dict[str, FakeDrafter]()
    async with running_router(directory, verifiers, drafters) as router:
        names = Names(router, static, verifiers)
        names.answers |= first
        verifiers.update(names.verifiers)
        drafters["d0:2"] = names.drafter
        config = replace(
            router.config,
            verifiers=("dns:///v:1",),
            drafters=("dns:///d:2",),
            discovery_interval_s=0.01,
        )
        discovery = PeerDiscovery(
            config, router.registry, close_channel=names.forget, resolve=names.resolve
        )
        discovery.start()
        try:
            yield names
        finally:
            await discovery.stop()


async def test_named_peers_of_both_kinds_join_a_running_router(tmp_path: Path) -> None:
    async with following(tmp_path, v=set(), d=set()) as names:
        await until(lambda: names.healthy == {"s"})
        names.answers |= {"v": {"a:1", "b:1"}, "d": {"d0:2"}}
        await until(lambda: names.healthy == {"s", "a:1", "b:1", "d0:2"})
        await until(lambda: {"s", "a:1", "b:1"} <= set(names.drafter.attached))
        # Discovery recalls nobody: a drafter that is about to stop says so until it has.
        names.drafter.change_info(draining=True)
        await names.look()
        assert (await names.drafter.info()).draining


async def test_a_peer_that_serves_is_kept_though_it_is_named_no_more(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        everybody = {"s", "a:1", "b:1", "d0:2"}
        await until(lambda: names.healthy == everybody)
        names.answers |= {"v": set(), "d": set()}
        await names.look()
        assert names.known == everybody and not names.forgotten
        # Nor does a resolver that is down take anybody away.
        names.answers |= {"v": None, "d": None}
        names.first.lost.set()
        await until(lambda: "a:1" not in names.known)
        assert names.known == {"s", "b:1", "d0:2"}


async def test_a_name_that_could_not_be_asked_for_is_asked_for_again(tmp_path: Path) -> None:
    async with following(tmp_path, v=None, d=None) as names:
        await names.look()
        names.answers |= {"v": {"a:1"}, "d": {"d0:2"}}
        await until(lambda: names.healthy == {"s", "a:1", "d0:2"})
    with pytest.raises(UnicodeError):
        await resolve("a" * 64 + ".b", 7)


async def test_a_verifier_that_is_gone_is_forgotten_by_all(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        await until(lambda: names.healthy == {"s", "a:1", "b:1", "d0:2"})
        names.first.lost.set()
        await until(lambda: "a:1" not in names.healthy)
        # It is named still, so it may come back.
        await names.look()
        assert "a:1" in names.known
        names.answers["v"] = {"b:1"}
        await until(lambda: "a:1" not in names.known)
        await until(lambda: names.drafter.detached == ["a:1"])
        await until(lambda: names.forgotten == ["a:1"])
        names.answers["v"] = {"a:1", "b:1"}
        names.first.lost.clear()
        await until(lambda: "a:1" in names.healthy)


async def test_another_verifier_may_come_to_the_address_of_one_that_is_gone(tmp_path: Path) -> None:
    async with following(tmp_path, v={"a:1"}) as names:
        await until(lambda: "a:1" in names.healthy)
        names.static.lost.set()
        await until(lambda: "s" not in names.healthy)
        assert (await names.router.generate(text_request())).text == "abcabc"
        names.first.lost.set()
        names.answers["v"] = set()
        await until(lambda: names.forgotten == ["a:1"])
        # As pods do that are given the address of an earlier one.
        second = names.dialled["a:1"] = fake("v2")
        names.answers["v"] = {"a:1"}
        await until(lambda: "a:1" in names.healthy)
        assert (await names.router.generate(text_request())).text == "abcabc"
        assert second.specs


async def test_a_drafter_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        await until(lambda: "d0:2" in names.healthy)
        names.answers["d"] = set()
        names.drafter.lost = True
        await until(lambda: "d0:2" not in names.known)
        await until(lambda: names.forgotten == ["d0:2"])


async def test_a_drafter_that_an_operator_removed_is_not_added_again(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        await until(lambda: "d0:2" in names.healthy)
        await names.registry.forget_drafter(names.registry.drafters["d0:2"])
        await names.look()
        assert "d0:2" not in names.known


async def test_requests_run_on_what_a_name_stands_for(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        await until(lambda: names.healthy == {"s", "a:1", "b:1", "d0:2"})
        requests = [text_request(max_tokens=30) for _ in range(6)]
        results = await asyncio.gather(*map(names.router.generate, requests))
        assert {result.text for result in results} == {"abc" * 10}
        assert names.first.specs and names.second.specs


async def test_a_verifier_that_vanished_is_missed_until_another_takes_its_place(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as names:
        await until(lambda: names.healthy == {"s", "a:1", "b:1", "d0:2"})
        assert names.registry.desired_verifiers == 3
        names.first.lost.set()
        names.answers["v"] = {"b:1"}
        await until(lambda: names.forgotten == ["a:1"])
        assert len(names.registry.verifiers) == 2
        assert names.registry.desired_verifiers == 3
        names.dialled["c:1"] = fake("v2")
        names.answers["v"] = {"b:1", "c:1"}
        await until(lambda: "c:1" in names.healthy)
        assert names.registry.desired_verifiers == 3


async def test_a_verifier_that_drained_before_it_stopped_is_not_missed(tmp_path: Path) -> None:
    async with following(tmp_path) as names:
        await until(lambda: names.healthy == {"s", "a:1", "b:1", "d0:2"})
        names.first.change_info(draining=True)
        names.answers["v"] = {"b:1"}
        await names.look()
        names.first.lost.set()
        await until(lambda: names.forgotten == ["a:1"])
        assert names.registry.desired_verifiers == 2


async def test_an_address_where_no_verifier_ever_answered_is_missed_as_long_as_it_is_named(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, v={"a:1"}) as names:
        await until(lambda: names.healthy == {"s", "a:1", "d0:2"})
        names.second.lost.set()
        names.answers["v"] = {"a:1", "b:1"}
        await until(lambda: "b:1" in names.known)
        assert names.registry.desired_verifiers == 3
        names.answers["v"] = {"a:1"}
        await until(lambda: "b:1" not in names.known)
        assert names.registry.desired_verifiers == 2


async def test_a_drafter_that_vanished_is_missed_and_one_that_drained_is_not(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as names:
        await until(lambda: names.registry.desired_drafters == 1)
        await until(lambda: names.registry.drafters["d0:2"].is_serving)
        names.answers["d"] = set()
        names.drafter.lost = True
        await until(lambda: names.forgotten == ["d0:2"])
        assert names.registry.desired_drafters == 1
        names.drafter.lost = False
        names.answers["d"] = {"d0:2"}
        await until(lambda: "d0:2" in names.known)
        await until(lambda: names.registry.drafters["d0:2"].is_serving)
        names.drafter.change_info(draining=True)
        await until(lambda: names.registry.drafters["d0:2"].is_leaving)
        await names.registry.forget_drafter(names.registry.drafters["d0:2"])
        assert names.registry.desired_drafters == 0


async def test_routers_are_known_by_address_and_by_name(tmp_path: Path) -> None:
    answers: dict[str, set[str] | None] = {"r": set()}

    async def resolve(host: str, port: int) -> frozenset[str]:
        assert port == 7
        answer = answers[host]
        if answer is None:
            raise OSError("it is down")
        return frozenset(answer)

    async def nothing_to_close(_address: str) -> None:
        raise AssertionError("routers have no channel of the registry")

    async with running_router(tmp_path, {"s": fake("s")}) as router:
        config = replace(router.config, routers=("a:7", "dns:///r:7"), discovery_interval_s=0.01)
        discovery = PeerDiscovery(
            config, router.registry, close_channel=nothing_to_close, resolve=resolve
        )
        assert discovery.router_addresses() == {"a:7"}
        discovery.start()
        try:
            answers["r"] = {"b:7", "c:7"}
            await until(lambda: discovery.router_addresses() == {"a:7", "b:7", "c:7"})
            answers["r"] = None
            await asyncio.sleep(0.05)
            assert discovery.router_addresses() == {"a:7", "b:7", "c:7"}
            answers["r"] = {"c:7"}
            await until(lambda: discovery.router_addresses() == {"a:7", "c:7"})
            answers["r"] = {f"p{number}:7" for number in range(500)}
            await until(lambda: len(discovery.router_addresses()) == MAX_ROUTERS)
        finally:
            await discovery.stop()
