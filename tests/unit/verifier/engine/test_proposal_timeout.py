"""A drafter that says nothing costs one proposal timeout in all; one that says too much is cut
off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from operator import sub

import pytest
from outrider_verifier.exchange.drafter_health import BURST_ENTRIES
from outrider_verifier.server import drafter_connections

from outrider.errors import OutriderError, UnavailableError
from outrider.ids import DrafterId, SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from outrider.transport.heartbeat import HeartbeatConfig
from outrider.wire.messages import Proposal, Proposals
from tests.fakes.scripted_drafter import make_tree
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import DRAFTER, Rig, good_chain, make_spec, mid_stream, verifier
from tests.waiting import until

PATIENCE_S = 0.3
PLAN = SpeculationPlan(
    method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=round(1000 * PATIENCE_S)
)
LASTING = HeartbeatConfig(interval_s=5.0, timeout_s=60.0)


def rounds_of(rig: Rig, names: list[str]) -> list[int]:
    """Rounds of these sessions; they must go on."""
    sessions = rig.service.core.sessions
    return [sessions[SessionId(name)].round_id for name in names]


async def test_a_hung_drafter_costs_one_patience_and_not_one_a_session() -> None:
    names = [f"s{number}" for number in range(4)]
    async with verifier(target=FakeTarget(num_blocks=2048), heartbeat=LASTING) as rig:
        rig.target.forward_s = 0.01
        drafter = await rig.attach(good_chain(rig.target))
        specs = [make_spec(name, max_new_tokens=300, plan=PLAN) for name in names]
        running = [asyncio.create_task(rig.run(spec)) for spec in specs[:3]]
        for name in names[:3]:
            await mid_stream(rig, name)
        drafter.muted = True
        counters = rig.service.core.counters
        await until(lambda: counters["drafters_stalled"] == 1)
        over = counters["proposal_timeouts"]
        assert over <= 3
        # A new session does not find out for itself, and nobody tries again while nothing comes.
        running.append(asyncio.create_task(rig.run(specs[3])))
        await mid_stream(rig, names[3])
        before = rounds_of(rig, names)
        await until(lambda: min(map(sub, rounds_of(rig, names), before)) > 4)
        assert counters["proposal_timeouts"] == over
        (seen,) = (await rig.service.info()).drafters
        assert seen.silent_ms > 0.0 and seen.proposal_timeouts == over and seen.answers > 0
        # Heard of again, all speculate again.
        drafter.muted = False
        used = counters["proposals_used"]
        await until(lambda: counters["proposals_used"] > used + 8)
        (seen,) = (await rig.service.info()).drafters
        assert seen.silent_ms == 0.0
        for spec, result in zip(specs, await asyncio.gather(*running), strict=True):
            assert result.tokens == rig.reference(spec)
        await rig.idle()


async def test_a_drafter_that_answers_others_is_not_silent() -> None:
    async with verifier(target=FakeTarget(num_blocks=2048)) as rig:
        rig.target.forward_s = 0.01
        good = good_chain(rig.target)
        await rig.attach(lambda f: None if f.start.session_id == "unlucky" else good(f))
        specs = [
            make_spec("s", max_new_tokens=400, plan=replace(PLAN, proposal_timeout_ms=30_000)),
            make_spec("unlucky", max_new_tokens=8, plan=PLAN),
        ]
        running = asyncio.create_task(rig.run(specs[0]))
        await mid_stream(rig, "s")
        result = await rig.run(specs[1])
        counters = rig.service.core.counters
        assert counters["proposal_timeouts"] >= 1
        assert counters["drafters_stalled"] == 0
        assert result.tokens == rig.reference(specs[1])
        result = await running
        assert result.tokens == rig.reference(specs[0])
        assert result.last.stats.fallback_rounds == 0


def bad_proposals(handle: int, count: int) -> Proposals:
    tree: DraftTree = make_tree([5])
    return Proposals.of_proposals(
        [Proposal(handle=handle, prefix_digest=n, prefix_len=1, tree=tree) for n in range(count)]
    )


@pytest.mark.parametrize("kind", ["stale", "strange"])
async def test_a_flood_is_cut_off_and_refused_for_a_while(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_connections, "DISCONNECT_TIMEOUT_S", 3.0)
    async with verifier(target=FakeTarget(num_blocks=2048)) as rig:
        rig.target.forward_s = 0.002
        drafter = await rig.attach(good_chain(rig.target))
        spec = make_spec(max_new_tokens=400, plan=PLAN)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        assert drafter.connection is not None
        handle = next(iter(drafter.names)) if kind == "stale" else 63
        flood, sent = bad_proposals(handle, 1000), 0
        try:
            async with asyncio.timeout(10.0):
                while True:
                    await drafter.connection.send(flood)
                    sent += 1000
                    await asyncio.sleep(0)
        except OutriderError:
            pass
        assert sent >= BURST_ENTRIES
        await until(lambda: not rig.service.drafter_connections.links)
        refused_until = asyncio.get_running_loop().time() + 3.0
        assert rig.service.read_counters()["drafters_disconnected_flooding"] == 1
        # Its name is not washed clean by a new connection.
        with pytest.raises((UnavailableError, AssertionError)):
            await rig.attach(good_chain(rig.target), incarnation="2")
        rig.drafters.pop()
        result = await running
        assert result.tokens == rig.reference(spec)
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() > refused_until)
        await rig.attach(good_chain(rig.target), incarnation="3")
        again = await rig.run(make_spec("t", plan=PLAN))
        assert again.last.stats.proposed > 0
        await rig.idle()


async def test_lies_are_counted_against_their_drafter() -> None:
    async with verifier(target=FakeTarget(num_blocks=2048)) as rig:
        drafter = await rig.attach(good_chain(rig.target))
        other = await rig.attach(good_chain(rig.target), drafter_id="drafter-1")
        spec = make_spec(max_new_tokens=300, plan=PLAN)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        handle = next(iter(drafter.names))
        unsound = Proposal(
            handle=handle, prefix_digest=1, prefix_len=1, tree=make_tree([10**6], [-1])
        )
        await drafter.send(unsound)
        # Somebody else's session.
        await other.send(
            Proposal(handle=handle, prefix_digest=1, prefix_len=1, tree=make_tree([5]))
        )
        result = await running
        assert result.tokens == rig.reference(spec)
        seen = {each.drafter_id: each for each in (await rig.service.info()).drafters}
        assert seen[DRAFTER].invalid == seen[DrafterId("drafter-1")].invalid == 1
