"""The drafter service over the in-process transport, against a scripted verifier."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.service import DRAIN_NOTICE_S

import outrider
from outrider.errors import FailedPreconditionError, InvalidRequestError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import validate_tree
from outrider.transport.framed_connection import FramedConnection
from outrider.wire.bundles import join_messages
from outrider.wire.codec import decode_drafter_message, encode_verifier_message
from outrider.wire.messages import (
    EncodedMessage,
    FeatureLayout,
    PlanChange,
    Proposals,
    ReplicaRoundLaunched,
    ReplicaSessionEnd,
    SessionEnd,
)
from tests.fakes.scripted_verifier import ScriptedVerifier
from tests.unit.drafter.helpers import CHAIN, TREE, VOCAB, Script, head_source, name_of, repeating
from tests.unit.drafter.running_service import ADDRESS, running
from tests.waiting import PATIENCE_S, until

NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3)


async def test_a_session_is_drafted_round_after_round(tmp_path: Path) -> None:
    async with running(head_source(tmp_path)) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = Script()
        await verifier.say(script.start(plan=TREE))
        for end in (9, 11, 15, 16):
            await verifier.say(script.verdict(end))
            proposal = await verifier.proposal()
            assert name_of(proposal) == script.session_id
            assert proposal.prefix_len == end
            assert proposal.prefix_digest == script.digest(end)
            assert proposal.draft_us > 0
            validate_tree(proposal.tree, vocab_size=VOCAB, max_nodes=TREE.draft_tokens)
        # The figures of a draft are written once its proposal is on its way.
        async with asyncio.timeout(PATIENCE_S):
            while (info := await service.info()).draft_ms_p50 == 0.0:
                await asyncio.sleep(0.005)
        assert info.sessions == 1
        assert info.verifiers == (ADDRESS,)
        await verifier.say(SessionEnd(handle=script.handle))
        await until(lambda: service.num_sessions == 0)


async def test_hello_says_what_must_agree(tmp_path: Path) -> None:
    source = head_source(tmp_path)
    async with running(source, NgramProposer()) as (service, verifier, _):
        await service.attach(ADDRESS)
        (hello,) = verifier.hellos
        assert hello.vocab_size == VOCAB and hello.tokenizer_hash == "abc"
        assert hello.methods == (DraftMethod.EAGLE3, DraftMethod.NGRAM)
        assert hello.feature_layout is FeatureLayout.PROJECTED
        assert hello.feature_fingerprint == source.head.fingerprint
        assert hello.drafter_id == "d1"


async def test_without_a_head_no_features_are_asked_for() -> None:
    async with running(NgramProposer()) as (service, verifier, _):
        await service.attach(ADDRESS)
        assert verifier.hellos[0].feature_layout is FeatureLayout.NONE
        assert verifier.hellos[0].feature_fingerprint == ""


async def test_attaching_twice_makes_one_connection() -> None:
    async with running() as (service, verifier, _):
        await asyncio.gather(service.attach(ADDRESS), service.attach(ADDRESS))
        await service.attach(ADDRESS)
        assert len(verifier.hellos) == 1


async def test_a_lost_connection_is_dialled_again_and_sessions_start_afresh() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = repeating()
        await verifier.say(script.start(plan=NGRAM), script.verdict(12))
        await verifier.proposal()
        await verifier.hang_up()
        await verifier.connected()
        await until(lambda: service.num_sessions == 0)
        replayed = repeating()
        await verifier.say(replayed.start(plan=NGRAM), replayed.verdict(14))
        proposal = await verifier.proposal()
        assert proposal.prefix_len == 14
        assert proposal.tree.tokens.tolist() == [4, 0, 1]
        assert verifier.hellos[0].incarnation == verifier.hellos[1].incarnation


async def test_a_verifier_that_comes_later_is_found() -> None:
    async with running() as (service, _, network):
        await service.attach("later")
        late = ScriptedVerifier()
        assert (await service.info()).verifiers == ()
        network.serve_verifier("later", late)
        await late.connected()
        await until(lambda: service.connected_to("later"))
        await network.remove("later")


async def test_a_misfit_is_refused_at_once_and_not_tried_again() -> None:
    async with running(verifier=ScriptedVerifier(refuse=True)) as (service, verifier, _):
        with pytest.raises(FailedPreconditionError):
            await service.attach(ADDRESS)
        await asyncio.sleep(0.1)
        assert len(verifier.hellos) == 1
        verifier.refuse = False
        await service.attach(ADDRESS)
        await verifier.connected()


async def test_a_verifier_of_another_protocol_is_refused_with_both_versions() -> None:
    scripted = ScriptedVerifier(protocol_version=1, version="")
    async with running(verifier=scripted) as (service, verifier, _):
        with pytest.raises(FailedPreconditionError, match=r"protocol 1; .*second fleet") as caught:
            await service.attach(ADDRESS)
        assert caught.value.reason == "PROTOCOL_MISMATCH"
        assert len(verifier.hellos) == 1
        assert verifier.hellos[0].version == (await service.info()).version == outrider.__version__


async def test_a_verifier_of_another_version_with_the_same_protocol_is_connected() -> None:
    async with running(verifier=ScriptedVerifier(version="9.1.0")) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()


async def test_a_verifier_that_never_answers_hello_is_dialled_again() -> None:
    async with running(verifier=ScriptedVerifier(welcome=False)) as (service, verifier, _):
        await service.attach(ADDRESS)
        await until(lambda: len(verifier.hellos) >= 2)
        assert (await service.info()).verifiers == ()
        verifier.welcome = True
        await until(lambda: service.connected_to(ADDRESS))


async def test_detaching_drops_the_sessions_and_the_connection() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = repeating()
        await verifier.say(script.start(plan=NGRAM), script.verdict(12))
        await verifier.proposal()
        await service.detach(ADDRESS)
        await service.detach(ADDRESS)
        await until(lambda: service.num_sessions == 0)
        await asyncio.sleep(0.1)
        assert len(verifier.hellos) == 1
        assert (await service.info()).verifiers == ()


async def test_an_address_must_be_given() -> None:
    async with running() as (service, _, _network):
        with pytest.raises(InvalidRequestError):
            await service.attach("")


async def test_a_plan_change_takes_effect_with_the_next_round() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = repeating()
        await verifier.say(script.start(plan=NGRAM), script.verdict(12))
        assert len((await verifier.proposal()).tree) == 3
        longer = replace(NGRAM, draft_tokens=6)
        await verifier.say(PlanChange(handle=script.handle, plan=longer))
        await verifier.say(script.verdict(13))
        assert len((await verifier.proposal()).tree) == 6


async def test_a_malformed_frame_costs_nothing_but_itself() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        connection: Any = await verifier.connected()
        script = repeating()
        await verifier.say(script.start(plan=NGRAM))
        await connection.inner.frames.send(b"\xff\xffnonsense")
        await verifier.say(script.verdict(12))
        assert (await verifier.proposal()).prefix_len == 12
        assert len(verifier.hellos) == 1


async def test_two_verifiers_are_served_at_once_and_never_mixed_up() -> None:
    async with running() as (service, first, network):
        second = ScriptedVerifier()
        network.serve_verifier("second", second)
        await asyncio.gather(service.attach(ADDRESS), service.attach("second"))
        await asyncio.gather(first.connected(), second.connected())
        for verifier, length in ((first, 12), (second, 13)):
            script = repeating("same name")
            await verifier.say(script.start(plan=NGRAM), script.verdict(length))
        assert (await first.proposal()).prefix_len == 12
        assert (await second.proposal()).prefix_len == 13
        assert sorted((await service.info()).verifiers) == ["second", ADDRESS]
        await network.remove("second")
        await until(lambda: not service.connected_to("second"))
        assert service.connected_to(ADDRESS)


async def test_the_worst_plan_of_one_session_stops_no_other(tmp_path: Path) -> None:
    async with running(head_source(tmp_path), NgramProposer(min_match=1)) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        good, odd = repeating("good"), Script("odd")
        await verifier.say(good.start(plan=NGRAM), odd.start(plan=CHAIN))
        await verifier.say(odd.verdict(12, with_features=False))
        await verifier.say(good.verdict(12, with_features=False))
        proposals = [await verifier.proposal() for _ in range(2)]
        assert {name_of(p): len(p.tree) for p in proposals} == {"good": 3, "odd": 0}


async def test_a_round_of_verdicts_is_answered_as_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered: list[int] = []
    offer = FramedConnection.try_send

    def counting(connection: FramedConnection[Any, Any], *messages: Any) -> bool:
        for message in messages:
            if isinstance(message, EncodedMessage):
                drafts = decode_drafter_message(message.data)
                assert isinstance(drafts, Proposals)
                offered.append(len(drafts))
        return offer(connection, *messages)

    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        connection = await verifier.connected()
        scripts = [repeating(str(number)) for number in range(8)]
        assert connection.try_send(*[script.start(plan=NGRAM) for script in scripts])
        monkeypatch.setattr(FramedConnection, "try_send", counting)
        for end in (12, 14):
            assert connection.try_send(*[script.verdict(end) for script in scripts])
            found = [await verifier.proposal() for _ in scripts]
            assert [name_of(p) for p in found] == [script.session_id for script in scripts]
            assert {p.prefix_len for p in found} == {end}
    assert [count for count in offered if count] == [8, 8]


async def test_a_malformed_verdict_of_a_round_costs_nothing_but_itself() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        connection: Any = await verifier.connected()
        scripts = [repeating(name) for name in "abc"]
        assert connection.try_send(*[script.start(plan=NGRAM) for script in scripts])
        encoded = [encode_verifier_message(script.verdict(12)) for script in scripts]
        encoded[1] = b"\xff\xffnonsense"
        (frame,) = join_messages(encoded)
        assert connection.inner.frames.try_send(frame)
        assert {name_of(await verifier.proposal()) for _ in range(2)} == {"a", "c"}
        registry = service.metrics.registry
        ignored = "outrider_drafter_ignored_messages_total"
        assert registry.get_sample_value(ignored, {"reason": "malformed"}) == 1
        assert len(verifier.hellos) == 1


async def test_messages_about_replicas_are_ignored() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = repeating()
        replica = [
            ReplicaSessionEnd(slot=3),
            ReplicaRoundLaunched(rows=1, chunks=0, is_sampled=True),
        ]
        await verifier.say(*replica, script.start(plan=NGRAM), script.verdict(12))
        assert (await verifier.proposal()).prefix_len == 12
        ignored = "outrider_drafter_ignored_messages_total"
        assert service.metrics.registry.get_sample_value(ignored, {"reason": "replica"}) == 2


async def test_a_drafter_hands_over_before_it_ends() -> None:
    async with running(max_sessions=7) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        info = await service.info()
        assert not info.draining and info.max_sessions == 7
        script = repeating()
        await verifier.say(script.start(plan=NGRAM), script.verdict(12))
        await verifier.proposal()
        leaving = asyncio.create_task(service.hand_over(20.0))
        await until(lambda: service.draining)
        # It drafts on, and nobody can call it back.
        await service.set_draining(False)
        assert (await service.info()).draining
        await verifier.say(script.verdict(14))
        assert (await verifier.proposal()).prefix_len == 14
        assert not leaving.done()
        await verifier.say(SessionEnd(handle=script.handle))
        assert await leaving
        assert service.connected_to(ADDRESS)


async def test_a_drafter_without_sessions_ends_once_somebody_has_heard_of_it() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        # What it said before tells nobody that it leaves.
        assert not (await service.info()).draining
        leaving = asyncio.create_task(service.hand_over(20.0))
        await until(lambda: service.draining)
        await asyncio.sleep(0.1)
        assert not leaving.done()
        assert (await service.info()).draining
        assert await asyncio.wait_for(leaving, DRAIN_NOTICE_S / 2)


async def test_a_drafter_of_whom_nobody_asks_ends_all_the_same() -> None:
    async with running() as (service, verifier, _):
        # Nobody counts on it before it is attached.
        assert await asyncio.wait_for(service.hand_over(20.0), DRAIN_NOTICE_S / 2)
        await service.attach(ADDRESS)
        await verifier.connected()
        assert await asyncio.wait_for(service.hand_over(20.0), 10.0)


async def test_a_drafter_whose_sessions_nobody_takes_ends_in_time() -> None:
    async with running() as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = repeating()
        await verifier.say(script.start(plan=NGRAM), script.verdict(12))
        await verifier.proposal()
        assert not await service.hand_over(0.1)


async def test_a_drafter_that_was_removed_may_stay_after_all() -> None:
    async with running() as (service, _, _network):
        for draining in (True, True, False):
            await service.set_draining(draining)
            assert (await service.info()).draining is draining
