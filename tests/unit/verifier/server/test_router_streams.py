"""Streams of sessions at the verifier: who owns what, who hears of what, and what is bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from outrider_verifier.engine.loop import EngineLoop
from outrider_verifier.server import router_streams

from outrider.errors import (
    ConnectionLostError,
    InternalError,
    InvalidRequestError,
    ResourceExhaustedError,
)
from outrider.transport.interface import RouterConnection
from outrider.wire.messages import (
    FinishReason,
    SessionEvents,
    SessionFailure,
    SessionLeave,
    SessionOpen,
    SessionsDraining,
)
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import ADDRESS, Rig, make_spec, verifier
from tests.waiting import PATIENCE_S, soon, until


async def router_of(rig: Rig) -> RouterConnection:
    return await (await rig.network.dialer().verifier(ADDRESS)).sessions()


async def next_failure(connection: RouterConnection) -> SessionFailure:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await connection.receive()
            if isinstance(message, SessionFailure):
                return message


async def test_the_sessions_of_a_round_are_one_message() -> None:
    async with verifier() as rig:
        connection = await router_of(rig)
        rig.target.forward_s = 0.01
        for handle in range(4):
            await connection.send(SessionOpen(handle, make_spec(f"s{handle}", drafter=None)))
        tokens: dict[int, list[int]] = {handle: [] for handle in range(4)}
        most, ended = 0, 0
        while ended < 4:
            message = await soon(connection.receive())
            assert isinstance(message, SessionEvents)
            most = max(most, len(message.handles))
            start = 0
            for handle, count in zip(message.handles, message.counts, strict=True):
                tokens[int(handle)] += message.tokens[start : start + count].tolist()
                start += count
            ended += int((message.finish_reasons > 0).sum())
        assert most == 4
        assert all(ids == rig.reference(make_spec(drafter=None)) for ids in tokens.values())
        await connection.close()
        await rig.idle()


async def test_routers_hear_of_their_own_sessions_and_lose_only_those() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.005
        first, second = await router_of(rig), await router_of(rig)
        # The same handle: handles belong to their stream.
        await first.send(SessionOpen(1, make_spec("a", max_new_tokens=800)))
        await second.send(SessionOpen(1, make_spec("b", max_new_tokens=30)))
        await until(lambda: rig.service.core.num_sessions == 2)
        await first.close()
        await until(lambda: rig.service.core.num_sessions <= 1)
        tokens: list[int] = []
        while len(tokens) < 30:
            message = await soon(second.receive())
            assert isinstance(message, SessionEvents)
            assert message.handles.tolist() == [1]
            tokens += message.tokens.tolist()
        assert tokens == rig.reference(make_spec("b", max_new_tokens=30))
        await second.close()
        await rig.idle()


async def test_a_handle_in_use_is_refused_and_a_session_that_is_left_makes_room() -> None:
    async with verifier(max_sessions=1) as rig:
        rig.target.forward_s = 0.005
        connection = await router_of(rig)
        await connection.send(SessionOpen(1, make_spec("a", max_new_tokens=800)))
        await connection.send(SessionOpen(1, make_spec("b")))
        assert (await next_failure(connection)).reason == "HANDLE_EXISTS"
        # The refusal was not the first one's: it goes on under its handle.
        await until(lambda: rig.service.core.num_sessions == 1)
        await connection.send(SessionLeave(1))
        await connection.send(SessionOpen(2, make_spec("c")))
        while True:
            message = await soon(connection.receive())
            assert isinstance(message, SessionEvents)
            if 2 in message.handles:
                break
        await connection.close()
        await rig.idle()


async def test_a_router_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_streams, "MAX_UNREAD_BYTES", 20_000)
    async with verifier() as rig:
        connection: Any = await router_of(rig)
        # The pipe holds 256 frames; what exceeds it counts.
        for handle in range(8):
            await connection.send(
                SessionOpen(handle, make_spec(f"s{handle}", drafter=None, max_new_tokens=900))
            )
        await until(lambda: rig.service.router_streams.counters["routers_overflowed"] == 1, 20.0)
        await until(lambda: rig.service.core.num_sessions == 0)
        with pytest.raises(ConnectionLostError):
            while True:
                await connection.receive()
        await connection.close()


async def test_openings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_OPENING", 0)
    async with verifier() as rig:
        result = await rig.run(make_spec())
        assert isinstance(result.error, ResourceExhaustedError)
        assert result.error.reason == "OPENING_EXHAUSTED"


async def test_requests_are_refused_while_the_engine_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with verifier() as rig:
        monkeypatch.setattr(EngineLoop, "backlog", property(lambda _: 1 << 20))
        result = await rig.run(make_spec())
        assert isinstance(result.error, ResourceExhaustedError)
        assert result.error.reason == "ENGINE_BEHIND"
        monkeypatch.undo()
        assert (await rig.run(make_spec())).error is None
        await rig.idle()


async def test_a_newer_epoch_that_never_fits_leaves_the_old_session_alone() -> None:
    # 16 slots for draft nodes and the root: 40 blocks of 4 leave 144 for a session.
    async with verifier(target=FakeTarget(num_blocks=40), max_sessions=1, max_waiting=0) as rig:
        rig.target.forward_s = 0.02
        old = asyncio.create_task(rig.run(make_spec(drafter=None)))
        await until(lambda: rig.service.core.num_sessions == 1)
        large = await rig.run(make_spec(drafter=None, epoch=1, max_new_tokens=140))
        assert isinstance(large.error, InvalidRequestError)
        assert rig.service.core.num_sessions == 1 and not old.done()
        # The old one's place is its own successor's.
        newer = await rig.run(make_spec(drafter=None, epoch=1))
        assert newer.tokens == rig.reference(make_spec())
        assert (await old).last.finish_reason is FinishReason.CANCELLED
        await rig.idle()


async def test_a_session_that_cannot_be_announced_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with verifier() as rig:
        core = rig.service.core
        closed: list[str] = []
        runner: Any = core.runner
        close = runner.close_session

        def noted(session: Any) -> None:
            closed.append(session.session_id)
            close(session)

        def broken(session: Any) -> None:
            raise RuntimeError("cannot be announced")

        with monkeypatch.context() as patch:
            patch.setattr(runner, "close_session", noted)
            patch.setattr(core.drafters, "announce", broken)
            result = await rig.run(make_spec())
        assert isinstance(result.error, InternalError)
        assert closed == ["s"]
        await rig.idle()
        assert (await rig.run(make_spec())).error is None


async def next_drain(connection: RouterConnection) -> SessionsDraining:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            message = await connection.receive()
            if isinstance(message, SessionsDraining):
                return message


async def test_a_drain_is_told_to_every_router_also_to_one_that_comes_late() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.02
        first, second = await router_of(rig), await router_of(rig)
        await first.send(SessionOpen(1, make_spec("a", max_new_tokens=500)))
        await until(lambda: rig.service.core.num_sessions == 1)
        draining = asyncio.create_task(rig.service.drain(20.0))
        told = [(await next_drain(connection)).seconds for connection in (first, second)]
        await asyncio.sleep(0.05)
        late = await router_of(rig)
        told.append((await next_drain(late)).seconds)
        assert 15.0 < told[2] < told[0] <= 20.0 and told[0] == pytest.approx(told[1], abs=0.01)
        # A session that its router has taken elsewhere is not waited for.
        await first.send(SessionLeave(1))
        assert await soon(draining)
        for connection in (first, second, late):
            await connection.close()
        await rig.idle()


async def test_what_is_left_at_the_end_of_a_drain_fails_and_frees_its_place() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.02
        connection = await router_of(rig)
        await connection.send(SessionOpen(1, make_spec("a", max_new_tokens=500)))
        await until(lambda: rig.service.core.num_sessions == 1)
        assert not await rig.service.drain(0.05)
        failure = await next_failure(connection)
        assert (failure.handle, failure.reason) == (1, "DRAINING")
        await connection.close()
        await rig.idle()
