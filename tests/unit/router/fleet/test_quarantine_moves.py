"""Drafters that are ill, leave or are full: the router's sessions go to others, or to nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from outrider_router.api.server_status import make_server_info
from outrider_router.fleet import quarantine

from outrider.client.commands.status import describe_server
from outrider.ids import DrafterId
from outrider.wire.messages import AttachedDrafter
from tests.fakes.router import sample
from tests.unit.router.requests.test_drafter_rebalancing import Pool, pool, restless
from tests.waiting import until

__all__ = ["restless"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MIN_BACKOFF_S", 0.8)


def say(it: Pool, name: str, **facts: float) -> None:
    """What the verifier says of a drafter from now on."""
    (now,) = [d for d in it.verifier.described.drafters if d.drafter_id == name]
    it.verifier.attach(replace(now, **facts))  # type: ignore[arg-type]


def count(it: Pool, name: str) -> None:
    """The verifier says how many sessions each drafter has, and that all is well with this one."""
    answers = next(d.answers for d in it.verifier.described.drafters if d.drafter_id == name)
    say(it, name, sessions=it.sessions()[name], answers=answers + 50)


def links(it: Pool) -> tuple[AttachedDrafter, ...]:
    """What the router has heard of the drafters."""
    info = it.router.registry.verifiers["v"].info
    assert info is not None
    return info.drafters


def quarantines(it: Pool, reason: str) -> float:
    return sample(it.router, "outrider_drafter_quarantines_total", reason=reason)


async def test_an_ill_drafters_sessions_go_to_another_and_it_is_probed(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(6)
        await it.settle(d0=3, d1=3)
        say(it, "d1", sessions=3, silent_ms=900.0)
        await until(lambda: it.sessions() == {"d0": 6})
        assert quarantines(it, "silent") == 1
        assert sample(it.router, "outrider_session_moves_total", why="quarantined") == 3
        (link,) = make_server_info(it.router).drafters[1].links
        assert link.quarantine == "silent"
        # Its sessions have gone; said still, they would show it to be ill before the probe began.
        say(it, "d1", sessions=0)
        # One is given to it to see; as long as that is ill, it stays at that.
        await until(lambda: it.sessions() == {"d0": 5, "d1": 1})
        say(it, "d1", sessions=1)
        await until(lambda: quarantines(it, "silent") == 2)
        await until(lambda: it.sessions() == {"d0": 6})
        # It is well again.
        say(it, "d1", sessions=0, silent_ms=0.0)
        await until(lambda: it.sessions() == {"d0": 5, "d1": 1})

        def well() -> bool:
            count(it, "d1")
            return it.sessions() == {"d0": 3, "d1": 3}

        await until(well)
        assert make_server_info(it.router).drafters[1].links[0].quarantine == ""


async def test_where_there_is_no_other_sessions_decode_plainly_until_the_probe(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path, 1) as it:
        await it.run(3)
        await it.settle(d0=3)
        say(it, "d0", sessions=3, answers=10)
        await until(lambda: links(it)[0].answers == 10)
        say(it, "d0", invalid=30)
        await until(lambda: it.sessions() == {None: 3})
        assert quarantines(it, "wrong") == 1
        *_, line = describe_server(make_server_info(it.router))
        assert "in quarantine (wrong" in line
        await until(lambda: it.sessions() == {None: 2, "d0": 1})

        def well() -> bool:
            count(it, "d0")
            return it.sessions() == {"d0": 3}

        await until(well)


async def test_another_process_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as it:
        await it.run(2)
        await it.settle(d0=2)
        say(it, "d0", sessions=2, silent_ms=5000.0)
        await until(lambda: quarantines(it, "silent") > 0)
        it.known["d0"].change_info(incarnation="2")
        it.verifier.detach(DrafterId("d0"))
        await it.settle(d0=2)


async def test_a_drafter_that_is_about_to_stop_hands_over_and_is_not_lost(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(4)
        await it.settle(d0=2, d1=2)
        it.known["d1"].change_info(draining=True)
        await it.settle(d0=4)
        assert sample(it.router, "outrider_session_moves_total", why="drained") == 2
        assert make_server_info(it.router).drafters[1].draining
        it.lose("d1")
        await until(lambda: not it.router.registry.drafters["d1"].is_serving)
        assert sample(it.router, "outrider_drafter_losses_total", drafter="d1") == 0
        # Its successor gets its share.
        it.known["d1"].lost = False
        it.known["d1"].change_info(incarnation="2", draining=False)
        await it.settle(d0=2, d1=2)
        assert sample(it.router, "outrider_drafter_losses_total", drafter="d1") == 0


async def test_the_last_drafter_drafts_on_until_it_stops(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as it:
        await it.run(2)
        await it.settle(d0=2)
        it.known["d0"].change_info(draining=True)
        await until(lambda: make_server_info(it.router).drafters[0].draining)
        await it.run(1)
        assert it.sessions() == {"d0": 2, None: 1}


async def test_a_drafter_gets_no_more_sessions_than_it_follows(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        it.known["d0"].change_info(max_sessions=2)
        info = it.router.registry.drafters["d0"]
        await until(lambda: info.info is not None and info.info.max_sessions == 2)
        await it.run(8)
        await it.settle(d0=2, d1=6)
        it.lose("d1")
        await until(lambda: it.sessions()["d0"] == 2 and it.sessions()["d1"] == 6)


async def test_a_removed_drafter_tells_other_routers_and_may_come_back(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(4)
        await it.settle(d0=2, d1=2)
        registry = it.router.registry
        peer = registry.drafters["d0"]
        await it.router.mover.drain_drafter(peer, 5.0)
        # Whoever else polls it sees that.
        assert it.known["d0"].described.draining
        await registry.forget_drafter(peer)
        registry.add_drafter("d0")
        await until(lambda: not it.known["d0"].described.draining)
        await it.settle(d0=2, d1=2)


async def test_a_drafter_that_another_router_has_removed_can_be_added_again(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(4)
        await it.settle(d0=2, d1=2)
        await it.known["d0"].set_draining(True)
        await it.settle(d1=4)
        it.router.registry.add_drafter("d0")
        await it.settle(d0=2, d1=2)
