"""Look-ahead controller: look-ahead or lock-step at each load, by tokens per second. Pure.

A model would have to know what a hit hides and what it costs: the drafter is late for a miss
because it drafts ahead, stale drafts are accepted less often, and on CPUs drafting ahead takes the
verifier's cores. So both modes are tried. Round times are compared at each load
(`outrider.speculation.look_ahead_probe`), emitted tokens on the same text, whatever the load
(`outrider.speculation.look_ahead_acceptance`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.look_ahead_acceptance import LookAheadAcceptance
from outrider.speculation.look_ahead_probe import LookAheadTrials, RoundModeObservation
from outrider.speculation.measurements import EmissionStats, RoundObservation
from outrider.speculation.speculation_controller import SpeculationController

HALF_LIFE_ROUNDS: Final = 256.0
"""Rounds after which what rows with drafts emitted counts half."""
MIN_SWITCH_GAIN: Final = 1.2
"""How much faster one way must be for the other to be left out where speculation is in doubt."""
RECOUNT_ROWS: Final = 4096.0
"""Rows after which hits are counted anew."""


class LookAheadController:
    """Chooses look-ahead or lock-step at each load, for one workload class."""

    def __init__(self, *, first: bool) -> None:
        """`first`: whether sessions begin with look-ahead."""
        self._first = first
        self.reset_drafter()

    def reset_drafter(self) -> None:
        """Another drafter takes over: what was found tells nothing of it."""
        self._ways: dict[int, LookAheadTrials] = {}
        self._stale = LookAheadAcceptance()
        self._drafted = EmissionStats()
        """Of rows that had a draft, either way."""
        self._hits = self._rows = 0.0

    def is_active(self, load: int) -> bool:
        """Whether sessions are to be drafted for ahead of their verdicts now."""
        return self._at(load).is_ahead

    def is_trial(self, load: int) -> bool:
        """Whether that is only to see what the other way gives."""
        return self._at(load).is_trial

    def gain(self, load: int) -> float:
        """Tokens per second under look-ahead over lock-step; nan while one is unknown."""
        return self._at(load).gain

    @property
    def miss_share(self) -> float:
        """Share of the rounds under look-ahead whose draft was not there when they were due, in
        [0, 1]; 1 while nothing is known."""
        return 1.0 - self._hits / self._rows if self._rows else 1.0

    def begin_session(self, sessions: int) -> None:
        """A session begins, one of so many of its kind."""
        self._stale.begin_session(sessions)

    def observe_round(
        self, load: int, seen: RoundObservation, *, ahead: bool, hits: int = 0, missed: int = 0
    ) -> bool:
        """Rows of a round that was run so; `hits` of them had a draft that was made ahead,
        `missed` went without any. Returns whether another way is in force from now on, trials
        aside."""
        if not (seen.rows > 0 and seen.seconds > 0.0):
            return False
        if ahead and seen.is_load_steady:
            self._count(seen.rows, hits)
        lap = self._lap(seen, missed)
        if seen.is_load_steady and seen.rows > missed:
            self._stale.observe_rows(_drafted(seen, missed), ahead=ahead)
        ways = self._at(load)
        before = ways.in_force
        ways.observe_round(lap, self._stale.estimate(), ahead=ahead)
        return ways.in_force is not before

    def follow_speculation(
        self, speculation: SpeculationController, before: DecodingMode, load: int
    ) -> None:
        """The speculation controller of speculation with plain decoding has changed its mode;
        `before`: what was in force there.

        Where speculation was left and look-ahead is not known to be much better than lock-step,
        that gets its turn against plain decoding. And while nobody speculates, it is tried now and
        then one way and now the other, unless that is known to be much worse.
        """
        ways = self._at(load)
        if ways.is_trial or (ways.gain if ways.in_force else 1.0 / ways.gain) > MIN_SWITCH_GAIN:
            return
        left = before is DecodingMode.SPECULATE and speculation.active_mode is DecodingMode.PLAIN
        if left and ways.in_force:
            ways.in_force = False
            speculation.reset_draft_statistics()
        elif speculation.is_probing and speculation.current_mode is DecodingMode.SPECULATE:
            ways.in_force = not ways.in_force

    def _lap(self, seen: RoundObservation, missed: int) -> RoundModeObservation:
        """The round by what rows with drafts emit: one without emits a token."""
        drafted = _drafted(seen, missed)
        self._drafted.decay(seen.rounds / HALF_LIFE_ROUNDS)
        self._drafted.add_observation(drafted)
        usual = self._drafted.mean
        rows = drafted.rows + missed / (usual if usual > 1.0 else 1.0)
        return RoundModeObservation(
            rows / max(1, seen.sessions), seen.seconds / rows, seen.is_load_steady, seen.is_timed
        )

    def _count(self, rows: int, hits: int) -> None:
        if self._rows > RECOUNT_ROWS:
            self._rows, self._hits = self._rows / 2.0, self._hits / 2.0
        self._rows += rows
        self._hits += hits

    def _at(self, load: int) -> LookAheadTrials:
        """That of a load; where nothing is known it begins with what was found at the nearest."""
        ways = self._ways.get(load)
        if ways is None:
            decided = [known for known, found in self._ways.items() if found.is_decided]
            if decided:
                near = min(decided, key=lambda known: abs(known - load))
                ways = LookAheadTrials.from_other_load(self._ways[near], near - load)
            else:
                ways = LookAheadTrials(ahead=self._first, waits=not self._first)
            self._ways[load] = ways
        return ways


def _drafted(seen: RoundObservation, missed: int) -> RoundObservation:
    """The rows with drafts; each of the others emitted a token."""
    if not missed:
        return seen
    rows, tokens, squares = seen.rows - missed, seen.tokens - missed, seen.squares - missed
    return replace(seen, rows=rows, tokens=tokens, squares=squares)
