"""A session goes from drafter to drafter while it runs, and nothing else changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from outrider.ids import DrafterId
from outrider.spec.noise import NoiseStream
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.sampling import Rule, SamplingParams
from outrider.transport.interface import RouterConnection
from outrider.wire.messages import (
    DRAFTER_ATTACHED,
    FALLBACK,
    LOOK_AHEAD_HIT,
    SessionEvents,
    SessionFailure,
    SessionMove,
    SessionMoved,
    SessionOpen,
    SessionSpec,
)
from tests.fakes.scripted_drafter import Draft, Followed, ProposeFn
from tests.unit.verifier.engine.test_look_ahead import AHEAD, foresee, looking_ahead
from tests.unit.verifier.harness import (
    ADDRESS,
    DRAFTER,
    Rig,
    garbage,
    good_chain,
    half_good_chain,
    make_spec,
    verifier,
)
from tests.waiting import until

OTHER = DrafterId("drafter-1")
NOBODY = DrafterId("nobody")
PATIENT = SpeculationPlan(method=DraftMethod.EAGLE3, draft_tokens=4, proposal_timeout_ms=30_000)
COUPLED = SamplingParams(temperature=0.8, seed=5, rule=Rule.COUPLED)


@dataclass(slots=True)
class Heard:
    """What a router hears of its one session."""

    connection: RouterConnection
    tokens: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    moved: list[DrafterId | None] = field(default_factory=list)
    finished: bool = False

    @classmethod
    async def of(cls, rig: Rig, spec: SessionSpec) -> Heard:
        """Open a session under handle 7."""
        connection = await (await rig.network.dialer().verifier(ADDRESS)).sessions()
        await connection.send(SessionOpen(7, spec))
        return cls(connection)

    async def move(self, drafter_id: DrafterId | None) -> None:
        await self.connection.send(SessionMove(7, drafter_id))

    async def read(self, *, tokens: int = 1 << 30, moves: int = 1 << 30) -> None:
        """Listen until so much was heard, or to the end."""
        async with asyncio.timeout(20.0):
            while len(self.tokens) < tokens and len(self.moved) < moves and not self.finished:
                message = await self.connection.receive()
                match message:
                    case SessionEvents():
                        self.tokens += message.tokens.tolist()
                        self.flags += message.flags.tolist()
                        self.proposed += message.proposed.tolist()
                        self.finished = bool(message.finish_reasons.any())
                    case SessionMoved(handle=handle, drafter_id=drafter_id):
                        assert handle == 7
                        self.moved.append(drafter_id)
                    case SessionFailure():
                        raise AssertionError(message)


def checked(rig: Rig, propose: ProposeFn, seen: list[Followed]) -> ProposeFn:
    """Drafts like `propose` and checks every feature that came."""

    def check(followed: Followed) -> Draft:
        seen.append(followed)
        for position, feature in enumerate(followed.features):
            expected = 2.0 * rig.target.feature(followed.tokens[: position + 1])
            assert np.array_equal(feature, expected), position
        return propose(followed)

    return check


@pytest.mark.parametrize("sampling", [SamplingParams(), COUPLED])
async def test_the_new_drafter_is_told_all_and_the_old_one_goodbye(
    sampling: SamplingParams,
) -> None:
    seen: list[Followed] = []
    async with verifier() as rig:
        rig.target.forward_s = 0.004
        old = await rig.attach(half_good_chain(rig.target))
        new = await rig.attach(
            checked(rig, good_chain(rig.target), seen), drafter_id=OTHER, incarnation="2"
        )
        spec = make_spec(max_new_tokens=80, plan=PATIENT, sampling=sampling)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=20)
        await heard.move(OTHER)
        await heard.read(moves=1)
        assert heard.moved == [OTHER]
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        assert old.ended == [spec.session_id]
        assert new.starts == 1 and seen[0].tokens[:5] == list(spec.token_ids)
        assert not any(flag & FALLBACK for flag in heard.flags)
        await heard.connection.close()
        await rig.idle()


async def test_a_session_whose_drafter_died_is_drafted_for_by_another() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.004
        old = await rig.attach(half_good_chain(rig.target))
        await rig.attach(good_chain(rig.target), drafter_id=OTHER)
        spec = make_spec(max_new_tokens=80, plan=PATIENT)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=20)
        await old.detach()
        await until(lambda: len(rig.service.drafter_connections.links) == 1)
        await heard.move(OTHER)
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        assert heard.moved == [OTHER]
        assert heard.flags[-1] & DRAFTER_ATTACHED and heard.proposed[-2] > 0


async def test_a_session_that_found_no_drafter_gets_the_one_that_comes_later() -> None:
    seen: list[Followed] = []
    async with verifier() as rig:
        rig.target.forward_s = 0.004
        spec = make_spec(max_new_tokens=60, plan=PATIENT, drafter=None)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=10)
        await rig.attach(checked(rig, good_chain(rig.target), seen), drafter_id=OTHER)
        await heard.move(OTHER)
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        assert seen and heard.proposed[-2] > 0
        await heard.connection.close()
        await rig.idle()


async def test_a_move_that_cannot_be_done_leaves_the_session_where_it_is() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.004
        mine = await rig.attach(good_chain(rig.target))
        await rig.attach(
            lambda _: None, drafter_id=OTHER, methods=(DraftMethod.NGRAM,), incarnation="2"
        )
        spec = make_spec(max_new_tokens=300, plan=PATIENT)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=10)
        for number, nowhere in enumerate((NOBODY, OTHER), start=1):
            await heard.move(nowhere)
            await heard.read(moves=number)
        # As if there had been no room for its features: nobody else can be told what came before.
        store = rig.service.core.store
        assert store is not None
        store.close(rig.service.core.sessions[spec.session_id].handle)
        await rig.attach(good_chain(rig.target), drafter_id="drafter-2")
        await heard.move(DrafterId("drafter-2"))
        await heard.read()
        assert heard.moved == [DRAFTER, DRAFTER, DRAFTER]
        assert heard.tokens == rig.reference(spec)
        # It hears of the end by another way than the router does.
        await until(lambda: mine.ended == [spec.session_id])
        assert mine.starts == 1
        exported = rig.service.metrics.registry.get_sample_value
        assert exported("outrider_verifier_moves_refused_total") == 3


@pytest.mark.parametrize("sampling", [SamplingParams(), COUPLED])
async def test_a_session_can_be_given_to_nobody_and_back(sampling: SamplingParams) -> None:
    seen: list[Followed] = []
    async with verifier() as rig:
        rig.target.forward_s = 0.004
        first = await rig.attach(checked(rig, half_good_chain(rig.target), seen))
        spec = make_spec(max_new_tokens=150, plan=PATIENT, sampling=sampling)
        heard = await Heard.of(rig, spec)
        await heard.read(tokens=20)
        await heard.move(None)
        await heard.read(moves=1)
        plain = len(heard.proposed)
        await heard.read(tokens=len(heard.tokens) + 20)
        assert heard.moved == [None] and not first.names
        # The round under way may have had a draft.
        assert not any(heard.proposed[plain + 2 :])
        await heard.move(DRAFTER)
        await heard.read()
        assert heard.moved == [None, DRAFTER] and any(heard.proposed[-8:])
        assert heard.tokens == rig.reference(spec)
        await heard.connection.close()
        await rig.idle()


async def test_a_session_that_is_moved_all_the_time_says_the_same() -> None:
    async with verifier() as rig:
        rig.target.forward_s = 0.001
        await rig.attach(half_good_chain(rig.target))
        await rig.attach(garbage(rig.target), drafter_id=OTHER, incarnation="2")
        spec = make_spec(max_new_tokens=200, plan=PATIENT, sampling=COUPLED)
        assert spec.sampling.has_noise_stream(NoiseStream.TARGET)
        heard = await Heard.of(rig, spec)
        while len(heard.tokens) < 190 and not heard.finished:
            # Several wishes at once: the last one is in force.
            for wish in (OTHER, DRAFTER, None, OTHER if len(heard.moved) % 2 else DRAFTER):
                await heard.move(wish)
            await heard.read(tokens=len(heard.tokens) + 4)
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        assert {DRAFTER, OTHER} <= set(heard.moved)
        assert rig.service.router_streams.num_moves == 0
        await heard.connection.close()
        await rig.idle()


async def test_moves_between_drafters_that_look_ahead_change_nothing() -> None:
    async with looking_ahead() as (rig, _):
        predict = foresee(rig.target)
        drafters = [
            await rig.attach(half_good_chain(rig.target), drafter_id=name, incarnation=name)
            for name in (DRAFTER, OTHER)
        ]
        for drafter in drafters:
            drafter.predict = predict
        spec = make_spec(max_new_tokens=300, plan=AHEAD, sampling=COUPLED)
        heard = await Heard.of(rig, spec)
        for number in range(1, 7):
            await heard.read(tokens=30 * number)
            await heard.move(OTHER if number % 2 else DRAFTER)
        await heard.read()
        assert heard.tokens == rig.reference(spec)
        assert heard.moved == [OTHER, DRAFTER] * 3
        assert sum(bool(flag & LOOK_AHEAD_HIT) for flag in heard.flags) > 6
        assert all(drafter.starts >= 3 for drafter in drafters)
        await heard.connection.close()


async def test_moves_of_nobodys_session_and_after_its_end_are_nothing() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        spec = make_spec()
        heard = await Heard.of(rig, spec)
        await heard.connection.send(SessionMove(99, DRAFTER))
        await heard.read()
        await heard.move(DRAFTER)
        assert heard.tokens == rig.reference(spec)
        again = await Heard.of(rig, make_spec("again"))
        await again.read()
        assert rig.service.router_streams.num_moves == 0
        assert heard.moved == []


async def test_a_verifier_says_how_soon_its_drafters_answer() -> None:
    async with verifier() as rig:
        await rig.attach(good_chain(rig.target))
        await rig.run(make_spec(max_new_tokens=40))
        (drafter,) = (await rig.service.info()).drafters
        assert 0.0 < drafter.answer_ms < 1000.0
        assert not drafter.same_host
