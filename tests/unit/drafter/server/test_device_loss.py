"""A drafter whose device stops working leaves its verifiers and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from outrider_drafter.proposers.interface import SessionDrafts
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.state.session import FollowedSession

from outrider.errors import UnavailableError
from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.wire.messages import FeatureLayout
from tests.unit.drafter.helpers import Script, answers, counted, make_engine
from tests.unit.drafter.running_service import ADDRESS, running
from tests.waiting import until

MODEL = SpeculationPlan(method=DraftMethod.MODEL, draft_tokens=3)
NGRAM = replace(MODEL, method=DraftMethod.NGRAM)
LOSSES = "outrider_drafter_device_losses_total"


class OnDevice:
    """A source whose work fails; `is_usable` says whether the device is the reason."""

    method = DraftMethod.MODEL
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""

    def __init__(self, *, usable: bool, fails_in: str = "drafts") -> None:
        self.is_usable = usable
        self._fails_in = fails_in
        self.calls = 0

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        self._work("catch_up")

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        self._work("drafts")
        yield from ()

    def release_session(self, session: FollowedSession) -> None:
        self._work("release")

    def _work(self, name: str) -> None:
        self.calls += 1
        if name == self._fails_in:
            raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("fails_in", ["drafts", "catch_up"])
@pytest.mark.parametrize("usable", [True, False])
def test_the_engine_asks_whether_the_device_is_the_reason(
    fails_in: str, usable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine([NgramProposer(), OnDevice(usable=usable, fails_in=fails_in)])
    for name in ("a", "b"):
        script = Script(name)
        engine.handle_message(1, script.start(plan=MODEL))
        engine.handle_message(1, script.verdict(10, draft_wanted=fails_in == "drafts"))
        # Whoever waits for a draft hears at once that none comes.
        found = answers(engine)
        assert [len(answer.tree) for answer in found] == [0] * (fails_in == "drafts")
    assert engine.device_lost is not usable
    assert counted(engine, LOSSES) == (0 if usable else 1)
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == (0 if usable else 1)


@pytest.mark.parametrize("fails_in", ["drafts", "catch_up", "release"])
async def test_a_drafter_without_a_device_leaves_and_refuses(fails_in: str) -> None:
    source = OnDevice(usable=False, fails_in=fails_in)
    async with running(source, NgramProposer(min_match=1)) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        script = Script()
        start = script.start(plan=MODEL)
        await verifier.say(start, script.verdict(12, draft_wanted=fails_in == "drafts"))
        if fails_in == "release":
            await verifier.say(replace(start, epoch=start.epoch + 1))
        async with asyncio.timeout(10):
            await service.lost.wait()
        await until(lambda: not service.is_drafting)
        await asyncio.sleep(0.2)
        # Nobody dials again.
        assert len(verifier.hellos) == 1
        assert not service.unsent_batches
        calls = source.calls
        for call in (service.info(), service.attach("other"), service.attach(ADDRESS)):
            with pytest.raises(UnavailableError) as refused:
                await call
            assert refused.value.reason == "DEVICE_LOST"
        await service.detach(ADDRESS)
        assert source.calls == calls


async def test_a_drafter_whose_device_works_goes_on() -> None:
    async with running(OnDevice(usable=True), NgramProposer(min_match=1)) as (service, verifier, _):
        await service.attach(ADDRESS)
        await verifier.connected()
        bad, good = Script("bad"), Script("good")
        good.tokens[:] = [i % 5 for i in range(len(good.tokens))]
        await verifier.say(bad.start(plan=MODEL), bad.verdict(12))
        assert len((await verifier.proposal()).tree) == 0
        await verifier.say(good.start(plan=NGRAM), good.verdict(12))
        assert len((await verifier.proposal()).tree) == 3
        assert not service.lost.is_set()
        assert (await service.info()).verifiers == (ADDRESS,)
