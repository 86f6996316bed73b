"""Services keep their cores awake while they have sessions, and only then."""

from __future__ import annotations

from contextlib import suppress

from outrider_drafter.metrics import DrafterMetrics
from outrider_drafter.proposers.ngram import NgramProposer
from outrider_drafter.server.draft_engine import ConnectionClosed, DraftEngine
from outrider_drafter.state.session import VerdictLimits

from outrider.busy_polling import BusyCores
from outrider.errors import OutriderError
from outrider.wire.messages import SessionEnd
from tests.unit.drafter.helpers import VOCAB, Script
from tests.unit.verifier.harness import close, make_spec, verifier
from tests.waiting import until


class Orders(BusyCores):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__({})
        self.given: list[bool] = []

    def set_busy(self, busy_cores: bool) -> None:
        self.given.append(busy_cores)


async def test_a_verifier_is_awake_from_its_first_session_to_its_last() -> None:
    orders = Orders()
    async with verifier(busy_cores=orders) as rig:
        assert orders.given == []
        # Slow enough that no session ends by itself while the test waits.
        rig.target.forward_s = 0.02
        first = rig.service.open_session(make_spec("a", max_new_tokens=200))
        await anext(first)
        second = rig.service.open_session(make_spec("b", max_new_tokens=200))
        await anext(second)
        assert set(orders.given) == {True}
        await close(first)
        assert orders.given[-1]
        await close(second)
        await until(lambda: not orders.given[-1])


async def test_a_refused_session_does_not_keep_a_verifier_awake() -> None:
    orders = Orders()
    async with verifier(busy_cores=orders) as rig:
        stream = rig.service.open_session(make_spec(prompt=()))
        with suppress(OutriderError):
            await anext(stream)
        assert orders.given == [True, False]


def test_a_drafting_engine_says_how_many_sessions_it_follows() -> None:
    counts: list[int] = []
    engine = DraftEngine(
        [NgramProposer()],
        limits=VerdictLimits(vocab_size=VOCAB, feature_size=0, max_context=4096),
        max_sessions=4,
        metrics=DrafterMetrics(),
        on_sessions=counts.append,
    )
    for name in ("a", "b", "c"):
        engine.handle_message(1, Script(name).start())
    engine.handle_message(1, SessionEnd(handle=Script("b").handle))
    engine.handle_message(1, ConnectionClosed())
    assert counts == [1, 2, 3, 2, 0]
