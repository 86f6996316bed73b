"""One drafter for several verifiers: each gets its share, whatever the others do."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import DraftEngine, OutgoingProposals, SessionMessage
from outrider_drafter.server.draft_loop import DraftLoop
from outrider_drafter.state.fair_share import (
    MAX_BATCH_SESSIONS,
    MAX_MESSAGES_PER_TURN,
    MAX_POLLS,
    FairQueue,
    choose_fairly,
)

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.transport.interface import VerifierConnection
from outrider.wire.messages import Verdicts
from tests.fakes.scripted_verifier import ScriptedVerifier
from tests.unit.drafter.helpers import make_engine, name_of, repeating
from tests.unit.drafter.running_service import ADDRESS, running
from tests.waiting import until

NGRAM = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=3)
GREEDY, SMALL = 1, 2
"""Connections of a verifier that wants everything and of one that wants little."""


# ---- whose drafts --------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 60),
)
def test_connections_take_turns_and_within_one_the_oldest_wish_is_first(
    wishes: list[tuple[int, int]], at_most: int
) -> None:
    connections = np.array([connection for connection, _ in wishes])
    wished_at = np.array([at for _, at in wishes])
    served = choose_fairly(connections, wished_at, at_most).tolist()
    assert served == sorted(set(served)) and len(served) == min(at_most, len(wishes))
    left = [place for place in range(len(wishes)) if place not in served]
    shares = Counter(connections[served].tolist())
    for place in left:
        mine = int(connections[place])
        # Nobody else got two more than one who still waits.
        assert all(shares[other] <= shares[mine] + 1 for other in shares)
        older = [p for p in served if connections[p] == mine]
        assert all(wished_at[p] <= wished_at[place] for p in older)


def wanted(engine: DraftEngine) -> dict[int, list[str]]:
    """Names of the sessions that one pass drafts for, by connection."""
    found: dict[int, list[str]] = {}
    for together in engine.draft_wanted():
        for connection, message in together:
            found.setdefault(connection, []).extend(map(name_of, message.iter_proposals()))  # type: ignore[union-attr]
    return found


def test_a_verifier_with_many_sessions_leaves_the_others_their_share_of_every_launch() -> None:
    engine = make_engine([NgramProposer(min_match=1)], max_sessions=256)
    many = [repeating(f"many{number}") for number in range(150)]
    few = [repeating(f"few{number}") for number in range(2)]
    for connection, scripts in ((GREEDY, many), (SMALL, few)):
        for script in scripts:
            engine.handle_message(connection, script.start(plan=NGRAM))
        engine.handle_message(
            connection, Verdicts.of_verdicts([script.entry(10) for script in scripts])
        )
    first = wanted(engine)
    assert first[SMALL] == ["few0", "few1"] and len(first[GREEDY]) == MAX_BATCH_SESSIONS - 2
    # Its next round does not wait until all of the other's were served.
    assert engine.has_wanted_drafts
    engine.handle_message(SMALL, Verdicts.of_verdicts([script.entry(12) for script in few]))
    second, third = wanted(engine), wanted(engine)
    assert second[SMALL] == ["few0", "few1"] and SMALL not in third
    assert not engine.has_wanted_drafts
    everybody = first[GREEDY] + second[GREEDY] + third[GREEDY]
    assert sorted(everybody) == sorted(script.session_id for script in many)


# ---- whose messages ------------------------------------------------------------------------


def test_messages_are_taken_in_turns_and_in_order() -> None:
    turns: FairQueue[str] = FairQueue()
    assert not turns
    turns.add_messages([(1, "a"), (1, "b"), (1, "c"), (2, "x")])
    assert list(turns.take_messages(2)) == [(1, "a"), (2, "x"), (1, "b")]
    turns.add_messages([(2, "y")])
    taking = turns.take_messages()
    assert next(taking) == (1, "c")
    taking.close()
    assert turns and list(turns.take_messages()) == [(2, "y")]
    assert not turns


def test_a_verifier_that_never_stops_talking_does_not_keep_others_from_their_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine([NgramProposer(min_match=1)])
    found: queue.Queue[tuple[OutgoingProposals, int]] = queue.Queue()
    handled: Counter[int] = Counter()

    def deliver(answers: OutgoingProposals) -> None:
        found.put_nowait((answers, handled[GREEDY]))

    worker = DraftLoop(engine, deliver, on_lost=_never)
    chatter, script = repeating("chatter"), repeating("quiet")
    handle = engine.handle_message

    def count(connection: int, message: SessionMessage) -> None:
        handled[connection] += 1
        handle(connection, message)
        if connection == GREEDY:
            # There is always one more.
            worker.submit_messages(GREEDY, chatter.start(plan=NGRAM))

    monkeypatch.setattr(engine, "handle_message", count)
    worker.submit_messages(GREEDY, *[chatter.start(plan=NGRAM)] * 5000)
    worker.submit_messages(SMALL, script.start(plan=NGRAM), script.verdict(10))
    worker.start()
    ((connection, _),), before = found.get(timeout=10)
    worker.submit_messages(SMALL, script.verdict(12))
    ((again, _),), _ = found.get(timeout=10)
    worker.stop()
    assert connection == again == SMALL
    assert before <= (MAX_POLLS + 2) * MAX_MESSAGES_PER_TURN


def _never() -> None:
    raise AssertionError("no device is lost")


# ---- who does not read ---------------------------------------------------------------------


class Deaf(ScriptedVerifier):
    """Reads the hello, then nothing any more until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.listens = asyncio.Event()
        self.greeted = asyncio.Event()

    async def exchange(self, connection: VerifierConnection) -> None:
        await super().exchange(_DeafConnection(connection, self))  # type: ignore[arg-type]


class _DeafConnection:
    def __init__(self, connection: VerifierConnection, verifier: Deaf) -> None:
        self._connection, self._verifier = connection, verifier
        self.peer, self.send, self.close = connection.peer, connection.send, connection.close

    async def receive(self) -> object:
        if self._verifier.greeted.is_set():
            await self._verifier.listens.wait()
        self._verifier.greeted.set()
        return await self._connection.receive()


async def test_a_verifier_that_does_not_read_costs_the_others_nothing() -> None:
    async with running(max_unsent_batches=64) as (service, good, network):
        deaf = Deaf()
        network.serve_verifier("deaf", deaf)
        for address, verifier in ((ADDRESS, good), ("deaf", deaf)):
            await service.attach(address)
            await verifier.connected()
        mute, heard = repeating("mute"), repeating("heard")
        await deaf.say(mute.start(plan=NGRAM), mute.verdict(10))
        await good.say(heard.start(plan=NGRAM), heard.verdict(10))
        await good.proposal()
        for _ in range(400):
            # The same verdict again: a draft each, which nobody reads. The pipe holds 256.
            mute.told, mute.features_told = 9, 9
            await deaf.say(mute.verdict(10, with_features=False))
            await asyncio.sleep(0.001)
        await until(lambda: max(service.unsent_batches) > 0)
        for end in range(11, 40):
            await good.say(heard.verdict(end))
            assert (await good.proposal()).prefix_len == end
        assert 0 < max(service.unsent_batches) <= 64
        deaf.listens.set()
        assert (await deaf.proposal()).prefix_len == 10
        await network.remove("deaf")
