"""Hook of a drafter that makes its drafts as slow as those of a slower device.

    --hook outrider_bench.hooks.slow_proposer:factor=3

After each step of drafting, the drafting thread waits until `factor` times the duration of the step
has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from outrider_drafter.hooks import DrafterHooks
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

from outrider.errors import InvalidRequestError
from outrider.wire.messages import WireTensor

StepT = TypeVar("StepT")
Waits = Callable[[float], None]

MAX_FACTOR: Final = 1000.0
_SPIN_S: Final = 0.0002


def install(hooks: DrafterHooks, *, factor: float) -> None:
    """Make all drafts `factor` times as slow. Raises InvalidRequestError for a factor that is out
    of range."""
    if not 1.0 <= factor <= MAX_FACTOR:
        raise InvalidRequestError(
            f"factor must be in [1, {MAX_FACTOR:g}], got {factor:g}", reason="INVALID_FACTOR"
        )
    hooks.proposer_wrappers.append(lambda proposer: slow_down(proposer, factor))
    hooks.handicaps.append(f"drafts {factor:g}x as slow")


def busy_wait(seconds: float) -> None:
    """Wait for `seconds`, accurate to some microseconds. Other threads of the process may run in
    the meantime."""
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
    """Return a proposer that wraps `source` and takes `factor` times as long for every
    computation."""
    if isinstance(source, LookAheadProposer):
        return SlowLookAheadProposer(source, factor, now, wait)
    return SlowProposer(source, factor, now, wait)


class SlowProposer:
    """Proposer that computes with another one and waits after each step for as long as a slower
    device would still compute."""

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
        """Convert features to the form that the wrapped proposer needs."""
        return self._source.convert_features(wire)

    @property
    def is_usable(self) -> bool:
        """Whether the device of the wrapped proposer still works."""
        return self._source.is_usable

    def catch_up(self, sessions: Sequence[FollowedSession]) -> None:
        """Process new tokens and features of these sessions."""
        began = self._now()
        self._source.catch_up(sessions)
        self._go_on_since(began)

    def draft_sessions(self, sessions: Sequence[FollowedSession]) -> Iterator[SessionDrafts]:
        """Process new tokens of these sessions and yield their drafts."""
        return self._slowly(lambda: self._source.draft_sessions(sessions))

    def release_session(self, session: FollowedSession) -> None:
        """Free the state of a session."""
        self._source.release_session(session)

    def _slowly(self, work: Callable[[], Iterator[StepT]]) -> Iterator[StepT]:
        """Yield the steps of `work`, and wait before each one is yielded. The time that the caller
        takes between steps is not counted."""
        began = self._now()
        for step in work():
            self._go_on_since(began)
            yield step
            began = self._now()
        self._go_on_since(began)

    def _go_on_since(self, began: float) -> None:
        self._wait(self._more * (self._now() - began))


class SlowLookAheadProposer(SlowProposer):
    """Slowed-down proposer that also supports look-ahead."""

    def __init__(
        self, source: LookAheadProposer, factor: float, now: Callable[[], float], wait: Waits
    ) -> None:
        super().__init__(source, factor, now, wait)
        self._ahead = source

    def score_proposals(self, lives: Sequence[PendingProposal]) -> OutcomeScores:
        """Return the tokens that the target may emit next after each node of these proposals, with
        their scores."""
        began = self._now()
        scored = self._ahead.score_proposals(lives)
        self._go_on_since(began)
        return scored

    def draft_outcomes(self, outcomes: Sequence[Outcome]) -> Iterator[OutcomeDrafts]:
        """Yield drafts for these outcomes of the proposals that were scored last."""
        return self._slowly(lambda: self._ahead.draft_outcomes(outcomes))
