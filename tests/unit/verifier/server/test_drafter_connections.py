"""Drafters: hello checks, hand-over of sessions, loss, return, and hostile messages."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import numpy as np
import pytest
from outrider_verifier.state.effects import CompleteCommand, SendMessage

import outrider
from outrider.errors import FailedPreconditionError
from outrider.ids import SessionId
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.framed_connection import FramedConnection
from outrider.transport.heartbeat import HeartbeatConfig, HeartbeatConnection
from outrider.wire.codec import decode_verifier_message
from outrider.wire.messages import EncodedMessage, FeatureLayout, SessionEnd, SessionsLost, Verdicts
from tests.fakes.scripted_drafter import Draft, Followed, ScriptedDrafter
from tests.fakes.target import FakeTarget
from tests.unit.verifier.harness import (
    ADDRESS,
    CHAIN,
    TREE,
    bushy_tree,
    good_chain,
    half_good_chain,
    make_spec,
    mid_stream,
    verifier,
)
from tests.waiting import until

PLAIN = SpeculationPlan()
LONG_PATIENCE = SpeculationPlan(
    method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000
)
SHORT_PATIENCE = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=150)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"protocol_version": 99}, "PROTOCOL_MISMATCH"),
        ({"vocab_size": 23}, "VOCAB_MISMATCH"),
        ({"fingerprint": "another head"}, "FEATURE_MISMATCH"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_refused(options: dict[str, Any], reason: str) -> None:
    async with verifier() as rig:
        settings = {"vocab_size": rig.target.vocab_size, **options}
        drafter = ScriptedDrafter(rig.network.dialer(), ADDRESS, lambda _f: None, **settings)
        with pytest.raises(FailedPreconditionError) as caught:
            await drafter.attach()
        assert caught.value.reason == reason
        assert (await rig.service.info()).drafters == ()


async def test_a_refusal_of_another_protocol_says_both_versions() -> None:
    async with verifier() as rig:
        drafter = ScriptedDrafter(
            rig.network.dialer(),
            ADDRESS,
            lambda _f: None,
            vocab_size=rig.target.vocab_size,
            protocol_version=1,
            version="0.1.7",
        )
        both = rf"version 0\.1\.7 and speaks protocol 1; .* {re.escape(outrider.__version__)} "
        with pytest.raises(FailedPreconditionError, match=both):
            await drafter.attach()


async def test_a_drafter_of_another_version_with_the_same_protocol_is_welcome() -> None:
    async with verifier() as rig:
        drafter = ScriptedDrafter(
            rig.network.dialer(),
            ADDRESS,
            lambda _f: None,
            vocab_size=rig.target.vocab_size,
            version="9.1.0",
        )
        await drafter.attach()
        info = await rig.service.info()
        assert len(info.drafters) == 1 and info.version == outrider.__version__
        await drafter.detach()


async def test_features_are_refused_where_no_projection_runs() -> None:
    async with verifier(features=False) as rig:
        with pytest.raises(FailedPreconditionError):
            await rig.attach(lambda _f: None)
        await rig.attach(lambda _f: None, layout=FeatureLayout.NONE, fingerprint="")


def check_features(target: FakeTarget, followed: Followed) -> None:
    """Every feature is the projected one of its own position."""
    for position, feature in enumerate(followed.features):
        expected = 2.0 * target.feature(followed.tokens[: position + 1])
        assert np.array_equal(feature, expected), position


async def test_a_chunked_prompt_arrives_with_the_features_of_every_position() -> None:
    seen: list[Followed] = []
    async with verifier(prefill_tokens_per_round=8) as rig:
        chain = half_good_chain(rig.target)

        def propose(followed: Followed) -> Draft:
            seen.append(followed)
            check_features(rig.target, followed)
            return chain(followed)

        await rig.attach(propose)
        spec = make_spec(prompt=[i % 24 for i in range(30)], max_new_tokens=12)
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        followed = seen[-1]
    sizes = [len(v.tokens) for v in followed.verdicts[:4]]
    assert sizes == [8, 8, 8, 7]
    assert [v.draft_wanted for v in followed.verdicts[:4]] == [False, False, False, True]
    assert followed.start.max_len == 42
    assert followed.tokens == [*spec.token_ids, *result.tokens][: len(followed.tokens)]


async def test_features_follow_the_accepted_nodes_of_a_tree() -> None:
    seen: list[Followed] = []
    async with verifier() as rig:
        tree = bushy_tree(rig.target)

        def propose(followed: Followed) -> Draft:
            seen.append(followed)
            return tree(followed)

        await rig.attach(propose)
        result = await rig.run(make_spec(max_new_tokens=20, plan=TREE))
        assert result.last.stats.accepted > 4
        check_features(rig.target, seen[-1])
        assert len(seen[-1].features) > 15


async def test_a_lost_drafter_leaves_the_stream_going_at_once() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        drafter = await rig.attach(half_good_chain(rig.target))
        spec = make_spec(max_new_tokens=40, plan=LONG_PATIENCE)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        await drafter.detach()
        began = time.monotonic()
        result = await running
        assert time.monotonic() - began < 10.0
        assert result.tokens == rig.reference(spec)
        assert result.events[1].drafter_attached
        assert not result.last.drafter_attached
        assert result.last.stats.fallback_rounds > 0


async def test_a_drafter_that_returns_is_caught_up_and_drafts_again() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        first = await rig.attach(half_good_chain(rig.target))
        spec = make_spec(max_new_tokens=80, plan=LONG_PATIENCE)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        await first.detach()
        await until(lambda: not rig.service.drafter_connections.links)
        await asyncio.sleep(0.05)
        chain = good_chain(rig.target)
        seen: list[Followed] = []

        def propose(followed: Followed) -> Draft:
            seen.append(followed)
            check_features(rig.target, followed)
            return chain(followed)

        second = await rig.attach(propose, incarnation="2")
        result = await running
        assert result.tokens == rig.reference(spec)
        assert seen
        assert second.broken is None
        # It heard of everything since the prompt, and the newest round had accepted drafts.
        assert seen[-1].tokens[:5] == list(spec.token_ids)
        assert result.last.drafter_attached
        assert len(result.last.tokens) > 1 or len(result.events[-2].tokens) > 1


async def test_a_drafter_that_attaches_during_prefill_gets_the_whole_prompt() -> None:
    async with verifier(prefill_tokens_per_round=4) as rig:
        rig.target.forward_s = 0.02
        spec = make_spec(prompt=[i % 24 for i in range(60)], max_new_tokens=10)
        running = asyncio.create_task(rig.run(spec))
        await until(lambda: len(rig.target.batches) >= 4)
        drafter = await rig.attach(good_chain(rig.target))
        result = await running
        assert drafter.broken is None
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.accepted > 0


async def test_a_newer_connection_of_a_drafter_replaces_the_older() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target), incarnation="1")
        await rig.attach(good_chain(rig.target), incarnation="2")
        await until(
            lambda: [link.incarnation for link in rig.service.drafter_connections.links] == ["2"]
        )
        spec = make_spec()
        result = await rig.run(spec)
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.accepted > 0


async def test_a_mute_drafter_costs_one_patience() -> None:
    async with verifier() as rig:
        drafter = await rig.attach(good_chain(rig.target))
        drafter.muted = True
        spec = make_spec(max_new_tokens=30, plan=SHORT_PATIENCE)
        began = time.monotonic()
        result = await rig.run(spec)
        elapsed = time.monotonic() - began
        assert result.tokens == rig.reference(spec)
        assert elapsed >= 0.15
        assert rig.service.core.counters["proposal_timeouts"] == 1
        assert result.last.stats.fallback_rounds == result.last.stats.rounds - 1


async def test_a_mute_drafter_that_speaks_again_is_waited_for_again() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.005
        drafter = await rig.attach(good_chain(rig.target))
        drafter.muted = True
        spec = make_spec(max_new_tokens=80, plan=SHORT_PATIENCE)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        drafter.muted = False
        result = await running
        assert result.tokens == rig.reference(spec)
        assert result.last.stats.accepted > 20


async def test_a_stalled_drafter_is_given_up_by_its_missing_heartbeats() -> None:
    heartbeat = HeartbeatConfig(interval_s=0.05, timeout_s=0.3)
    async with verifier(heartbeat=heartbeat) as rig:
        drafter = await rig.attach(good_chain(rig.target))
        assert isinstance(drafter.connection, HeartbeatConnection)
        # A hung event loop sends no heartbeats either.
        drafter.connection.stop_heartbeats()
        await drafter.stall()
        await until(lambda: not rig.service.drafter_connections.links)


async def test_one_rows_slow_proposal_does_not_stall_another_session() -> None:
    async with verifier() as rig:
        chain = good_chain(rig.target)

        def propose(followed: Followed) -> Draft:
            return None if followed.start.session_id == "slow" else chain(followed)

        await rig.attach(propose)
        slow = asyncio.create_task(rig.run(make_spec("slow", plan=LONG_PATIENCE)))
        await until(lambda: rig.service.core.num_sessions == 1)
        began = time.monotonic()
        fast = await rig.run(make_spec("fast", max_new_tokens=30))
        assert time.monotonic() - began < 5.0
        assert len(fast.tokens) == 30
        slow.cancel()


async def test_a_plan_change_turns_speculation_off_and_on() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        drafter = await rig.attach(good_chain(rig.target))
        spec = make_spec(max_new_tokens=120)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        session = rig.service.core.sessions[SessionId("s")]
        assert session.speculation_state is not None
        await rig.service.set_plan(SessionId("s"), PLAIN)
        assert session.speculation_state is None
        await until(lambda: SessionId("s") not in drafter.sessions)
        rounds = session.round_id
        await until(lambda: session.round_id > rounds + 3)
        await rig.service.set_plan(SessionId("s"), CHAIN)
        assert session.speculation_state is not None
        result = await running
        assert result.tokens == rig.reference(spec)
        assert drafter.starts == 2
        sizes = [len(event.tokens) for event in result.events]
        assert max(sizes[:4]) == 5
        assert sizes.count(1) >= 4
        assert 5 in sizes[sizes.index(1, 1) :]


async def test_a_plan_change_of_the_same_method_is_passed_on() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.01
        drafter = await rig.attach(half_good_chain(rig.target))
        running = asyncio.create_task(rig.run(make_spec(max_new_tokens=60)))
        await mid_stream(rig)
        wider = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=9, top_k=3)
        await rig.service.set_plan(SessionId("s"), wider)
        await until(lambda: drafter.sessions[SessionId("s")].plan == wider)
        await running
        assert drafter.starts == 1


async def test_a_drafter_that_does_not_read_is_disconnected() -> None:
    async with verifier(drafter_queue_mb=1, prefill_tokens_per_round=4096) as rig:
        drafter = await rig.attach(lambda _f: None)
        await drafter.stall()
        link = rig.service.drafter_connections.links[0].link_id
        for _ in range(8000):
            rig.service.drafter_connections.send_messages(link, SessionEnd(handle=7))
        await until(lambda: not rig.service.drafter_connections.links)
        assert rig.service.drafter_connections.counters["drafters_overflowed"] == 1


async def test_a_session_past_the_feature_budget_keeps_its_text() -> None:
    async with verifier(feature_budget_mb=0) as rig:
        rig.target.forward_s = 0.01
        first = await rig.attach(good_chain(rig.target))
        spec = make_spec(max_new_tokens=60, plan=LONG_PATIENCE)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        await first.detach()
        second = await rig.attach(good_chain(rig.target), incarnation="2")
        result = await running
        assert result.tokens == rig.reference(spec)
        # What cannot be replayed is not announced.
        assert second.starts == 0


async def test_what_a_round_says_to_a_drafter_leaves_at_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with verifier() as rig:
        told: list[tuple[int, ...]] = []
        monkeypatch.setattr(
            rig.service.drafter_connections,
            "send_messages",
            lambda link, *messages: told.append((link, *messages)),
        )
        a, b, c, d = (SessionEnd(handle=number) for number in range(4))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rig.service.perform_effects(
            [
                SendMessage(7, a),
                CompleteCommand(answer),
                SendMessage(2, b),
                SendMessage(7, c),
                SendMessage(7, d),
            ]
        )
        assert told == [(7, a, c, d), (2, b)]
        assert answer.done()


async def test_verdicts_of_sessions_that_share_a_round_are_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[int] = []
    offer = FramedConnection.try_send

    def counting(connection: FramedConnection[Any, Any], *messages: Any) -> bool:
        for message in messages:
            if isinstance(message, EncodedMessage):
                told = decode_verifier_message(message.data)
                assert isinstance(told, Verdicts)
                offered.append(len(told))
        return offer(connection, *messages)

    monkeypatch.setattr(FramedConnection, "try_send", counting)
    async with verifier(batch_wait_ms=50.0) as rig:
        rig.target.forward_s = 0.01
        await rig.attach(good_chain(rig.target))
        specs = [make_spec(f"s{number}", max_new_tokens=30) for number in range(4)]
        results = await rig.run_all(specs)
        assert all(r.tokens == rig.reference(s) for r, s in zip(results, specs, strict=True))
    assert max(offered) == 4


async def test_a_session_that_its_drafter_lost_is_announced_again_a_few_times() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.005
        drafter = await rig.attach(good_chain(rig.target))
        assert drafter.connection is not None
        spec = make_spec(max_new_tokens=400)
        running = asyncio.create_task(rig.run(spec))
        await mid_stream(rig)
        session = rig.service.core.sessions[SessionId("s")]
        counters = rig.service.core.counters
        for number in range(1, 5):
            told = len(drafter.ended)
            await drafter.connection.send(SessionsLost((0, 9999)))
            await until(lambda told=told: len(drafter.ended) > told)  # type: ignore[misc]
            if number < 4:
                await until(lambda number=number: drafter.starts == 1 + number)  # type: ignore[misc]
                accepted = counters["accepted_tokens"]
                await until(lambda accepted=accepted: counters["accepted_tokens"] > accepted)  # type: ignore[misc]
        assert drafter.starts == 4 and session.link_id is None
        result = await running
        assert result.tokens == rig.reference(spec)
        assert rig.service.core.counters["sessions_lost_by_drafters"] == 4
