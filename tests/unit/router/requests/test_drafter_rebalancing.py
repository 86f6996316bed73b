"""Drafters join, leave and are lost while requests run: sessions follow, texts do not change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from outrider_router.api.pool_grpc import pool_service
from outrider_router.api.server_status import make_server_info
from outrider_router.requests import drafter_rebalancer
from outrider_router.requests.service import RouterService

from outrider.client.commands import main
from outrider.client.commands.drafters import add_drafter, remove_drafter
from outrider.client.commands.status import describe_server
from outrider.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
)
from outrider.ids import VerifierId
from outrider.spec.plan import DraftMethod
from outrider.transport.grpc import GrpcServer
from outrider.wire.inference import GenerateResult, SpeculationOptions
from tests.fakes.drafter import FakeDrafter
from tests.fakes.router import running_router, sample
from tests.fakes.verifier import FakeVerifier
from tests.unit.router.helpers import text_request
from tests.waiting import until

TEXT = "abc" * 400


class Pool:
    """A router, a slow verifier, and drafters d0, d1, ... at addresses of the same names."""

    def __init__(
        self, router: RouterService, verifier: FakeVerifier, known: dict[str, FakeDrafter]
    ):
        self.router, self.verifier, self.known = router, verifier, known
        self.requests: list[asyncio.Task[GenerateResult]] = []

    async def run(self, count: int) -> None:
        before = len(self.verifier.live)
        self.requests += [
            asyncio.create_task(self.router.generate(text_request(max_tokens=len(TEXT))))
            for _ in range(count)
        ]
        await until(lambda: len(self.verifier.live) == before + count)
        # Every session has begun.
        await until(
            lambda: all(e.output.first_token_at is not None for e in self.router.running_requests)
        )

    def sessions(self) -> Counter[str | None]:
        return Counter(spec.drafter_id for spec in self.verifier.live.values())

    async def settle(self, **expected: int) -> None:
        await until(lambda: self.sessions() == expected)
        # The router knows it too.
        await until(lambda: self.router.running_requests.sessions_by_drafter() == expected)

    def lose(self, name: str) -> None:
        self.known[name].lost = True
        self.verifier.detach(self.known[name].described.drafter_id)


@asynccontextmanager
async def pool(directory: Path, drafters: int, *, known: int = 3) -> AsyncGenerator[Pool]:
    """With so many of the known drafters configured; every request must end with its text."""
    verifier = FakeVerifier(round_s=0.005, kv_blocks=2048, max_context_len=4096)
    everybody: dict[str, FakeDrafter] = {}
    for number in range(known):
        everybody[f"d{number}"] = FakeDrafter({"v": verifier}, name=f"d{number}")
    configured = {f"d{number}": everybody[f"d{number}"] for number in range(drafters)}
    async with running_router(directory, {"v": verifier}, configured) as router:
        configured.update(everybody)
        running = Pool(router, verifier, everybody)
        yield running
        verifier.round_s = 0.0
        for result in await asyncio.gather(*running.requests):
            assert result.text == TEXT


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_rebalancer, "MIN_MOVE_INTERVAL_S", 0.0)


async def test_a_lost_drafters_sessions_go_on_with_the_others(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(6)
        await it.settle(d0=3, d1=3)
        it.lose("d1")
        await it.settle(d0=6)
        assert sample(it.router, "outrider_session_moves_total", why="lost") == 3
        await until(lambda: sample(it.router, "outrider_drafter_up", drafter="d1") == 0)
        # It comes back and gets its share again.
        it.known["d1"].lost = False
        it.known["d1"].change_info(incarnation="2")
        await it.settle(d0=3, d1=3)


async def test_sessions_that_began_without_a_drafter_get_one(tmp_path: Path) -> None:
    async with pool(tmp_path, 0) as it:
        await it.run(3)
        assert it.sessions() == {None: 3}
        it.router.registry.add_drafter("d0")
        await it.settle(d0=3)
    assert all(request.result().finish.stats.proposed > 0 for request in it.requests)


async def test_a_session_that_wants_no_drafts_is_given_no_drafter(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as it:
        plain = SpeculationOptions(method=DraftMethod.NONE)
        task = asyncio.create_task(
            it.router.generate(text_request(max_tokens=50, speculation=plain))
        )
        await task
        assert it.verifier.moves == []


async def test_a_drafter_that_is_added_takes_over_sessions_that_run(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as it:
        await it.run(8)
        await it.settle(d0=8)
        it.router.registry.add_drafter("d1")
        it.router.registry.add_drafter("d1")
        await it.settle(d0=4, d1=4)
        assert sample(it.router, "outrider_session_moves_total", why="balance") == 4
        it.router.registry.add_drafter("d2")
        await until(lambda: max(it.sessions().values()) <= 3)


async def test_a_removed_drafter_hands_over_first_and_is_forgotten(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(8)
        await it.settle(d0=4, d1=4)
        peer = it.router.registry.drafters["d0"]
        removed = await it.router.mover.drain_drafter(peer, 5.0)
        assert removed == (4, 0)
        assert it.sessions() == {"d1": 8}
        summary = next(d for d in make_server_info(it.router).drafters if d.address == "d0")
        assert summary.draining
        with pytest.raises(FailedPreconditionError):
            it.router.registry.add_drafter("d0")
        await it.router.registry.forget_drafter(peer)
        assert it.known["d0"].detached == ["v"]
        assert [d.address for d in make_server_info(it.router).drafters] == ["d1"]
        # It was not lost, and it may come again.
        assert sample(it.router, "outrider_drafter_losses_total", drafter="d0") == 0
        it.router.registry.add_drafter("d0")
        await it.settle(d0=4, d1=4)


async def test_the_last_drafter_can_be_removed_and_its_sessions_decode_plainly(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path, 1) as it:
        await it.run(2)
        await it.settle(d0=2)
        peer = it.router.registry.drafters["d0"]
        assert await it.router.mover.drain_drafter(peer, 5.0) == (0, 2)
        await it.router.registry.forget_drafter(peer)
        assert it.verifier.described.drafters == ()
        it.router.registry.add_drafter("d1")
        await it.settle(d1=2)


async def test_a_drafter_that_does_not_answer_can_be_removed(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(4)
        await it.settle(d0=2, d1=2)
        it.lose("d0")
        peer = it.router.registry.drafters["d0"]
        await it.router.mover.drain_drafter(peer, 5.0)
        await it.router.registry.forget_drafter(peer)
        await it.settle(d1=4)


async def test_a_verifier_that_refuses_is_not_asked_for_ever(tmp_path: Path) -> None:
    async with pool(tmp_path, 2) as it:
        await it.run(2)
        await it.settle(d0=1, d1=1)
        it.verifier.refuses_moves = True
        it.lose("d1")
        await until(
            lambda: (
                sample(it.router, "outrider_session_moves_total", why="lost")
                == drafter_rebalancer.MAX_REFUSED_MOVES
            )
        )
        await asyncio.sleep(0.2)
        assert sample(it.router, "outrider_session_moves_total", why="lost") == 3
        assert it.sessions() == {"d0": 1, "d1": 1}


async def test_status_tells_who_drafts_for_whom(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as it:
        await until(lambda: len(make_server_info(it.router).drafters[0].links) == 1)
        (link,) = make_server_info(it.router).drafters[0].links
        assert link.verifier_id == VerifierId("v0")
        peer = it.router.registry.drafters["d0"]
        peer.is_draining = True
        *_, line = describe_server(make_server_info(it.router))
        assert line.endswith("0 sessions, v0 (0 sessions), leaving")


async def test_operators_add_and_remove_drafters_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pool(tmp_path, 1) as it:
        server = GrpcServer("127.0.0.1:0", [pool_service(it.router)])
        address = await server.start()
        try:
            await it.run(6)
            command = ["drafters", "add", "d1", "--pool", address]
            assert await asyncio.to_thread(main.main, command) == 0
            await it.settle(d0=3, d1=3)
            command = ["drafters", "remove", "d0", "--pool", address]
            assert await asyncio.to_thread(main.main, command) == 0
            assert "3 sessions moved to other drafters, 0 decode" in capsys.readouterr().out
            await it.settle(d1=6)
            with pytest.raises(NotFoundError):
                await asyncio.to_thread(remove_drafter, address, "d0")
            with pytest.raises(InvalidRequestError):
                await asyncio.to_thread(add_drafter, address, "")
        finally:
            await server.stop(0.0)


async def test_the_number_of_drafters_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_router.fleet.registry.MAX_PEERS", 2)
    async with pool(tmp_path, 1) as it:
        it.router.registry.add_drafter("d1")
        with pytest.raises(ResourceExhaustedError):
            it.router.registry.add_drafter("d2")
