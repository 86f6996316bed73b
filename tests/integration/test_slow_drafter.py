"""A drafter that falls behind finds its way back: it drafts for the newest prefix alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_drafter.config import DrafterConfig
from outrider_drafter.proposers.interface import ProposedDraft, SessionDrafts
from outrider_drafter.server.service import DrafterService, TargetIdentity
from outrider_drafter.state.session import FollowedSession

from outrider.spec.plan import DraftMethod, SpeculationPlan
from outrider.spec.tree import DraftTree
from outrider.wire.messages import FeatureLayout, SpecStats, WireTensor
from tests.fakes.target import FakeTarget
from tests.unit.drafter.running_service import FAST
from tests.unit.verifier.harness import ADDRESS, DRAFTER, Rig, make_spec, verifier
from tests.waiting import PATIENCE_S, until

FORWARD_S = 0.003
STALLED = 40
"""Rounds of a session that a stall lasts at least."""
BACK = 100
"""Within so many its drafts are used again; within 20 where the machine itself does not stall."""


class SlowSource:
    """Drafts what the target will say, after a time that a test sets."""

    method = DraftMethod.NGRAM
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    is_usable = True

    def __init__(self, target: FakeTarget, draft_s: float) -> None:
        self.draft_s = draft_s
        self.well = threading.Event()
        """Drafting stops while it is not set."""
        self.well.set()
        self.behind: list[int] = []
        """Tokens that were new to each draft."""
        self._target = target
        self._seen: dict[int, int] = {}

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        return wire.data

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Nothing to do."""

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        drafts: list[tuple[FollowedSession, ProposedDraft]] = []
        for session in sessions:
            self.behind.append(len(session.tokens) - self._seen.get(session.slot, 0))
            self._seen[session.slot] = len(session.tokens)
            count = min(session.plan.draft_tokens, session.draft_levels_left)
            tokens = self._target.decode(session.tokens.view.tolist(), count, session.sampling)
            drafts.append(
                (session, ProposedDraft(tree=DraftTree.chain(np.array(tokens, np.int32))))
            )
        time.sleep(self.draft_s)
        assert self.well.wait(PATIENCE_S)
        yield SessionDrafts.of_drafts([(s, d) for s, d in drafts if len(d.tree)])

    def release_session(self, session: FollowedSession) -> None:
        self._seen.pop(session.slot, None)


@asynccontextmanager
async def drafted(rig: Rig, source: SlowSource) -> AsyncIterator[None]:
    """The verifier with a drafter service over a source attached."""
    service = DrafterService(
        DrafterConfig(drafter_id=DRAFTER, methods=(DraftMethod.NGRAM,), reconnect=FAST),
        [source],
        rig.network.dialer(),
        identity=TargetIdentity(vocab_size=rig.target.vocab_size),
    )
    await service.attach(ADDRESS)
    await until(lambda: bool(rig.service.drafter_connections.links))
    try:
        yield
    finally:
        await service.close()


async def stats_after_stall(
    rig: Rig, source: SlowSource, *, sessions: int
) -> tuple[float, float, list[SpecStats]]:
    """Rounds without a draft, a session, when the stall began and when it ended; what the sessions
    got in all."""
    plan = SpeculationPlan(method=DraftMethod.NGRAM, draft_tokens=4, proposal_timeout_ms=1000)
    specs = [make_spec(f"s{n}", max_new_tokens=700, plan=plan) for n in range(sessions)]
    running = asyncio.create_task(rig.run_all(specs))
    served = rig.service.core.sessions
    await until(lambda: len(served) == sessions)
    first = served[specs[0].session_id]
    await until(lambda: first.round_id >= 5)
    counters = rig.service.core.counters
    before = counters["fallback_rounds"] / sessions
    source.well.clear()
    await until(lambda: counters["fallback_rounds"] / sessions >= before + STALLED)
    stalled = counters["fallback_rounds"] / sessions
    source.well.set()
    results = await running
    for result, spec in zip(results, specs, strict=True):
        assert result.tokens == rig.reference(spec)
    return before, stalled, [result.last.stats for result in results]


@pytest.mark.parametrize("draft_s", [0.001, 0.006], ids=["faster than a round", "slower"])
@pytest.mark.parametrize("sessions", [1, 4])
async def test_fallback_ends_when_the_drafter_is_well_again(sessions: int, draft_s: float) -> None:
    async with verifier(target=FakeTarget(num_blocks=1024)) as rig:
        rig.target.forward_s = FORWARD_S
        source = SlowSource(rig.target, draft_s)
        async with drafted(rig, source):
            before, stalled, after = await stats_after_stall(rig, source, sessions=sessions)
    assert before <= 2
    missed = sum(stats.fallback_rounds for stats in after) / sessions
    assert missed <= stalled + BACK
    assert min(stats.rounds - stats.fallback_rounds for stats in after) > 15
    assert max(source.behind) > 20, "it was told of every round and skipped ahead"
