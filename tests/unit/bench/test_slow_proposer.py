"""A drafter of a slower device takes longer, and that is all."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from outrider_bench.hooks.slow_proposer import SlowProposer, busy_wait, install, slow_down
from outrider_drafter.hooks import DrafterHooks
from outrider_drafter.proposers.interface import (
    LookAheadProposer,
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    ProposedDraft,
    SessionDrafts,
    empty_scores,
)
from outrider_drafter.state.session import FollowedSession

from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod
from outrider.spec.tree import DraftTree
from outrider.wire.messages import FeatureLayout, WireTensor


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waited.append(round(seconds, 6))
        self.now += seconds


class Source:
    """Takes a second for each step."""

    method = DraftMethod.NGRAM
    feature_layout = FeatureLayout.NONE
    feature_size = 0
    feature_fingerprint = ""
    is_usable = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.released = 0

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        return wire.data

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        self._clock.now += 1.0

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        for _ in range(2):
            self._clock.now += 1.0
            yield SessionDrafts.of_drafts([])

    def release_session(self, session: FollowedSession) -> None:
        self.released += 1


class Ahead(Source):
    """The same, ahead of verdicts."""

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        self._clock.now += 1.0
        return empty_scores(())

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        self._clock.now += 1.0
        nothing = ProposedDraft(tree=DraftTree.chain(np.zeros(0, np.int32)))
        yield OutcomeDrafts(
            outcomes=np.zeros(0, np.int64),
            node_counts=np.zeros(0, np.int64),
            tokens=nothing.tree.tokens,
            parents=nothing.tree.parents,
            logprobs=nothing.tree.logprobs,
        )


def test_every_step_is_followed_by_the_time_that_is_missing() -> None:
    clock = Clock()
    source = slow_down(Ahead(clock), 3.0, now=clock, wait=clock.wait)
    assert isinstance(source, LookAheadProposer)
    for _ in source.draft_sessions([]):
        clock.now += 100.0  # What is done with a draft is not the device's.
    assert clock.waited == [2.0, 2.0, 0.0]
    clock.waited.clear()
    source.catch_up([])
    source.score_proposals([])
    assert [len(branches.outcomes) for branches in source.draft_outcomes([])] == [0]
    assert clock.waited == [2.0, 2.0, 2.0, 0.0]


def test_a_source_stays_what_it_is() -> None:
    clock = Clock()
    plain = Source(clock)
    slow = slow_down(plain, 1.5, now=clock, wait=clock.wait)
    assert not isinstance(slow, LookAheadProposer)
    assert (slow.method, slow.is_usable, slow.feature_size) == (DraftMethod.NGRAM, True, 0)


def test_the_hook_wraps_every_proposer_and_says_so() -> None:
    hooks = DrafterHooks()
    install(hooks, factor=3.0)
    wrapped = hooks.wrap_proposer(Source(Clock()))
    assert isinstance(wrapped, SlowProposer)
    assert hooks.handicap == "drafts 3x as slow"


@pytest.mark.parametrize("factor", [0.5, -2.0, 1e4])
def test_a_factor_out_of_range_is_refused(factor: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"factor must be in \[1, 1000\]"):
        install(DrafterHooks(), factor=factor)


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.002])
def test_a_wait_is_never_too_short(seconds: float) -> None:
    began = time.perf_counter()
    busy_wait(seconds)
    assert time.perf_counter() - began >= seconds
