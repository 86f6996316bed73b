"""Stores the features and prefix K/V of a finished round for later use; engine thread only.

Features serve drafters that attach later, prefixes serve sessions whose prompts begin alike.
Copying features takes up to 2 ms in a round of 32 sessions. While drafts are waited for, the copy
is deferred until the next round is submitted, or until the stored features are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider import timeline
from outrider_verifier.engine.core import EngineCore
from outrider_verifier.engine.failure_handler import FailureHandler
from outrider_verifier.engine.in_flight_round import InFlightRound
from outrider_verifier.engine.round_reporter import RoundReporter
from outrider_verifier.model_runner.interface import RunnerOutput
from outrider_verifier.model_runner.results import CommittedRows, RowResult
from outrider_verifier.state.session import Session
from outrider_verifier.state.session_phase import ENDED


class RoundStorage:
    """Stores features and prefixes of finished rounds, at once or deferred."""

    def __init__(self, core: EngineCore, accounts: RoundReporter, failing: FailureHandler) -> None:
        self._core, self._accounts, self._failing = core, accounts, failing
        self._unkept: list[tuple[list[Session], Exception]] = []
        """Rounds of which something could not be kept."""

    def store_round(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: Sequence[RowResult],
        decoded: CommittedRows,
        *,
        later: bool,
    ) -> None:
        """Keep what there is of a settled round; `later`: something is waited for meanwhile."""
        work, store = partial(self._keep, in_flight, outcome, prompts, decoded), self._core.store
        if later and store is not None:
            store.defer(work)
        else:
            work()
            self.fail_unstored_rounds()

    def run_deferred(self) -> None:
        """Do what was left."""
        if self._core.store is not None:
            self._core.store.run_deferred()
        self.fail_unstored_rounds()

    def fail_unstored_rounds(self) -> None:
        """End the sessions of rounds of which something could not be kept."""
        while self._unkept:
            self._failing.fail_round(*self._unkept.pop())

    def _keep(
        self,
        in_flight: InFlightRound,
        outcome: RunnerOutput,
        prompts: Sequence[RowResult],
        decoded: CommittedRows,
    ) -> None:
        # Whoever looks at what is kept may have called this, in the middle of what they do with
        # sessions: nobody is ended here.
        began = timeline.now()
        try:
            self._accounts.keep_round_features(in_flight, outcome.decoded, prompts, decoded)
            for row in prompts:
                if row.session.is_prefilled and row.session.phase is not ENDED:
                    self._core.block_manager.store_prefix(row.session)
        except Exception as bug:
            self._unkept.append((in_flight.sessions, bug))
        timeline.mark_span("keep", began, len(in_flight.verify))
