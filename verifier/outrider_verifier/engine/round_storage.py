"""What is kept of a round for others: features for a drafter of some later day, prompts for
sessions that begin alike (engine thread only).

Copying features takes long, up to 2 ms of a round of 32 sessions. Where drafts are waited for, that
is left until the next round is submitted, or until somebody looks at what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider import timeline
from outrider_verifier.engine.core import Core
from outrider_verifier.engine.failure_handler import Failing
from outrider_verifier.engine.in_flight_round import InFlight
from outrider_verifier.engine.round_reporter import Accounts
from outrider_verifier.model_runner.interface import RoundOutcome
from outrider_verifier.model_runner.results import Committed, Settled
from outrider_verifier.state.session import Session


class Keeping:
    """Keeps what rounds of a core's sessions leave."""

    def __init__(self, core: Core, accounts: Accounts, failing: Failing) -> None:
        self._core, self._accounts, self._failing = core, accounts, failing
        self._unkept: list[tuple[list[Session], Exception]] = []
        """Rounds of which something could not be kept."""

    def keep(
        self,
        flying: InFlight,
        outcome: RoundOutcome,
        prompts: Sequence[Settled],
        decoded: Committed,
        *,
        later: bool,
    ) -> None:
        """Keep what there is of a settled round; `later`: something is waited for meanwhile."""
        work, store = partial(self._keep, flying, outcome, prompts, decoded), self._core.store
        if later and store is not None:
            store.later(work)
        else:
            work()
            self.end_unkept()

    def catch_up(self) -> None:
        """Do what was left."""
        if self._core.store is not None:
            self._core.store.catch_up()
        self.end_unkept()

    def end_unkept(self) -> None:
        """End the sessions of rounds of which something could not be kept."""
        while self._unkept:
            self._failing.all(*self._unkept.pop())

    def _keep(
        self,
        flying: InFlight,
        outcome: RoundOutcome,
        prompts: Sequence[Settled],
        decoded: Committed,
    ) -> None:
        # Whoever looks at what is kept may have called this, in the middle of what they do with
        # sessions: nobody is ended here.
        began = timeline.now()
        try:
            self._accounts.keep_features(flying, outcome.decoded, prompts, decoded)
            for row in prompts:
                if row.session.prefilled and not row.session.ended:
                    self._core.room.keep_prefix(row.session)
        except Exception as bug:
            self._unkept.append((flying.sessions, bug))
        timeline.span("keep", began, len(flying.verify))
