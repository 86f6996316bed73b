"""A drafter of a slower device, for benchmarks: every draft takes several times as long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.wire.messages import WireTensor
from outrider_drafter.proposers.interface import (
    LookAheadProposer,
    Outcome,
    OutcomeDrafts,
    OutcomeScores,
    PendingProposal,
    Proposer,
    SessionDrafts,
)
from outrider_drafter.state.session import FollowedSession

StepT = TypeVar("StepT")
Waits = Callable[[float], None]

_SPIN_S: Final = 0.0002


def busy_wait(seconds: float) -> None:
    """Return so much later, to some microseconds; other threads of the process may run."""
    end = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < end:
        time.sleep(0.0)


def slow_down(
    source: Proposer,
    factor: float,
    *,
    now: Callable[[], float] = time.perf_counter,
    wait: Waits = busy_wait,
) -> Proposer:
    """The source, `factor` times as slow at all that it computes; itself where that is 1."""
    if factor == 1.0:
        return source
    if isinstance(source, LookAheadProposer):
        return SlowLookAheadProposer(source, factor, now, wait)
    return SlowProposer(source, factor, now, wait)


class SlowProposer:
    """A source that waits after each step, as long as a slower device would still be busy."""

    def __init__(
        self, source: Proposer, factor: float, now: Callable[[], float], wait: Waits
    ) -> None:
        self._source = source
        self._more = factor - 1.0
        self._now, self._wait = now, wait
        self.method = source.method
        self.feature_layout = source.feature_layout
        self.feature_size = source.feature_size
        self.feature_fingerprint = source.feature_fingerprint

    def convert_features(self, wire: WireTensor) -> NDArray[np.generic]:
        """As the source wants to find them."""
        return self._source.convert_features(wire)

    @property
    def is_usable(self) -> bool:
        """Whether the device still works."""
        return self._source.is_usable

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Take in what is new of these sessions."""
        began = self._now()
        self._source.catch_up(sessions)
        self._go_on_since(began)

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Catch up and draft."""
        return self._slowly(lambda: self._source.draft_sessions(sessions))

    def release_session(self, session: FollowedSession) -> None:
        """Free what is kept of a session."""
        self._source.release_session(session)

    def _slowly(self, work: Callable[[], Iterator[StepT]]) -> Iterator[StepT]:
        """The steps of some work; what is done with them in between is not slowed down."""
        began = self._now()
        for step in work():
            self._go_on_since(began)
            yield step
            began = self._now()
        self._go_on_since(began)

    def _go_on_since(self, began: float) -> None:
        self._wait(self._more * (self._now() - began))


class SlowLookAheadProposer(SlowProposer):
    """The same of a source that can draft ahead."""

    def __init__(
        self, source: LookAheadProposer, factor: float, now: Callable[[], float], wait: Waits
    ) -> None:
        super().__init__(source, factor, now, wait)
        self._ahead = source

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """What the target may emit at each place of these proposals."""
        began = self._now()
        scored = self._ahead.score_proposals(lives)
        self._go_on_since(began)
        return scored

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Draft for outcomes of the proposals last scored."""
        return self._slowly(lambda: self._ahead.draft_outcomes(outcomes))
