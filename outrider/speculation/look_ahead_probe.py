"""Trials of look-ahead against lock-step at one load, by measured round times. Pure.

Few rounds tell the time of a round; its tokens vary with the text, but between the modes only as
much as drafts from older features do (`outrider.speculation.look_ahead_acceptance`). So the faster
mode is the one whose rounds take less time for what they emit, relative to the other's on the same
text. The other mode is tried after the first rounds, when the mode in force seems to have fallen
behind, and from time to time; the possible loss is bounded by a share of the time served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from outrider.speculation.look_ahead_acceptance import LogRatioEstimate
from outrider.speculation.measurements import RoundTimeWindow

TRIAL_BUDGET: Final = 0.005
"""Share of the time that trials may lose."""
REDUCED_TRIAL_BUDGET: Final = 0.01
"""The same while it is not clear which way is faster."""
MIN_FIRST_ROUNDS: Final = 10.0
"""Rounds of a way after which it is compared with the other for the first time."""
TRIAL_ROUNDS: Final = 6.0
LONG_TRIAL_ROUNDS: Final = 20.0
"""Rounds of a trial, and what it is extended to while it decides nothing and loses next to
nothing."""
SMALL_LOSS_ROUNDS: Final = 1.0
"""Rounds that are next to nothing."""
MAX_LOSS_ROUNDS: Final = 6.0
"""Rounds that a trial may lose before it is broken off."""
FIRST_LOSS_ROUNDS: Final = 2.0
"""Rounds that a trial is thought to lose before there was one."""
MIN_TRIAL_COST: Final = 1.5
"""Rounds that a trial counts as at least: so trials are at most a few in a hundred rounds."""
MIN_TRIAL_COST_WHEN_EQUAL: Final = 0.5
"""The same while the two ways seem to be equal: then much is to be learnt and little to be lost."""
MIN_TRIAL_ROUNDS: Final = 1.9
"""Rounds of a trial without which it is not judged."""
MIN_STD_ERRORS: Final = 1.5
"""Standard errors by which a way must seem slower for the other to be tried at once."""
CONFIRM_STD_ERRORS: Final = 1.0
"""Standard errors by which a trial must bear that out."""
CLEAR_ERRORS: Final = 2.5
"""Standard errors beyond which it is clear which way is faster."""
CLEAR_GAIN: Final = 1.2
"""How much faster a way must be at one load for it to be no question at the next."""
TIME_WINDOW_ROUNDS: Final = 32
"""Rounds that tell what one takes: with drafts that are there or not, times differ."""
TIME_ERROR: Final = 0.02
"""What rounds of one moment leave unknown of those of another, as a share of their time."""


class RoundModeObservation(NamedTuple):
    """One observed round in one mode (look-ahead or lock-step)."""

    rounds: float
    """How many rounds of all sessions that makes, by what rows with drafts emit."""
    round_s: float
    is_load_steady: bool
    """Whether it says more of the way than of the change to it."""
    is_timed: bool
    """Whether its seconds tell anything."""


@dataclass(slots=True)
class _Trial:
    rounds: float = 0.0
    lost_s: float = 0.0
    stalled: bool = False
    """Whether a round was taken for a stall."""


class LookAheadTrials:
    """Chooses look-ahead or lock-step for one workload class at one load."""

    def __init__(self, *, ahead: bool, waits: bool = False) -> None:
        """`ahead`: what it begins with. `waits`: whether the other way is tried only when that is
        paid for, because this one is likely to be right."""
        self.in_force = ahead
        """Whether that is look-ahead, trials aside."""
        self._waits = waits
        self._sure = False
        """Whether the last trial left no doubt."""
        self._times = {way: RoundTimeWindow(TIME_WINDOW_ROUNDS) for way in (False, True)}
        self._share = LogRatioEstimate(0.0, 0.0)
        self._trial: _Trial | None = None
        self._credit_s = 0.0
        self._cost_s = math.nan
        """What the last trial lost."""

    @classmethod
    def from_other_load(cls, other: LookAheadTrials, halvings: int = 0) -> LookAheadTrials:
        """At a load at which nothing is known, by what was found at the nearest one, which is
        `halvings` higher (negative: lower).

        The more there is to do beside, the less look-ahead gives: where it is clearly faster it is
        at lower loads, where it is clearly slower it is at higher ones.
        """
        clear = other.log_gain > math.log(CLEAR_GAIN) and other.in_force is (halvings >= 0)
        return cls(ahead=other.in_force, waits=clear)

    @property
    def is_ahead(self) -> bool:
        """Whether sessions are to be drafted for ahead of their verdicts now."""
        return self.in_force is (self._trial is None)

    @property
    def is_trial(self) -> bool:
        """Whether that is only to see what the other way gives."""
        return self._trial is not None

    @property
    def is_decided(self) -> bool:
        """Whether both ways were seen."""
        return not math.isnan(self.gain)

    @property
    def gain(self) -> float:
        """Tokens per second under look-ahead over lock-step; nan while one is unknown."""
        return math.exp(self._share.log) * self._times[False].mean_s / self._times[True].mean_s

    @property
    def log_gain(self) -> float:
        """The logarithm of what the way in force gives over the other one; nan: unknown."""
        return math.log(self.gain) * (1.0 if self.in_force else -1.0)

    @property
    def log_gain_error(self) -> float:
        """Standard error of `lead`."""
        times = sum(t.error**2 for t in self._times.values())
        return math.sqrt(self._share.variance + times + TIME_ERROR**2)

    def observe_round(
        self, lap: RoundModeObservation, share: LogRatioEstimate, *, ahead: bool
    ) -> None:
        """A round went so; `share`: what is known of it now."""
        self._share = share
        if ahead is not self.is_ahead:
            return
        if self._trial is not None:
            self._tried(self._trial, lap)
        else:
            self._went_on(lap)

    def _went_on(self, lap: RoundModeObservation) -> None:
        mine = self._times[self.in_force]
        usual_s = mine.mean_s
        if not math.isnan(usual_s):
            # Usual rounds count: a stall pays for no trial.
            self._credit_s += (
                (TRIAL_BUDGET if self._sure else REDUCED_TRIAL_BUDGET) * lap.rounds * usual_s
            )
        if not lap.is_load_steady:
            # Coming back is part of what a trial costs.
            lost_s = 0.0 if math.isnan(usual_s) else lap.rounds * (lap.round_s - usual_s)
            self._credit_s -= max(0.0, lost_s)
            return
        if lap.is_timed:
            mine.observe_round(lap.round_s, lap.rounds)
        if mine.rounds >= MIN_FIRST_ROUNDS and self._due(mine.mean_s):
            self._trial = _Trial()
            self._times[not self.in_force].clear()

    def _due(self, usual_s: float) -> bool:
        """Whether the other way is to be tried."""
        lead = self.log_gain
        if math.isnan(lead) and not self._waits:
            return True
        if lead < 0.0 and lead < -MIN_STD_ERRORS * self.log_gain_error:
            return True
        lost_s = FIRST_LOSS_ROUNDS * usual_s if math.isnan(self._cost_s) else self._cost_s
        if self._credit_s < max(lost_s, MIN_TRIAL_COST_WHEN_EQUAL * usual_s):
            return False
        return lead < self.log_gain_error or self._credit_s >= MIN_TRIAL_COST * usual_s

    def _tried(self, trial: _Trial, lap: RoundModeObservation) -> None:
        """A round of the way that is being tried."""
        usual = self._times[self.in_force]
        usual_s = usual.mean_s
        if usual.clip_outlier(lap.round_s) < lap.round_s and not trial.stalled:
            # Either way may meet one; the next one as long is this way's.
            trial.stalled = True
            return
        # What such a round emits, in rounds of the way in force.
        worth = math.exp(-self._share.log if self.in_force else self._share.log)
        trial.lost_s += lap.rounds * (lap.round_s - worth * usual_s)
        if lap.is_load_steady:
            trial.rounds += lap.rounds
            if lap.is_timed:
                self._times[not self.in_force].observe_round(lap.round_s, lap.rounds)
        lost = trial.lost_s / usual_s
        lead, error = self.log_gain, self.log_gain_error
        known = trial.rounds > MIN_TRIAL_ROUNDS
        hopeless = known and lead > CLEAR_ERRORS * error
        longer = lost < SMALL_LOSS_ROUNDS and abs(lead) < CONFIRM_STD_ERRORS * error
        enough = trial.rounds >= (LONG_TRIAL_ROUNDS if longer else TRIAL_ROUNDS)
        if lost > MAX_LOSS_ROUNDS or hopeless or enough:
            self._end(trial)
            self._sure = known and abs(lead) > MIN_STD_ERRORS * error

    def _end(self, trial: _Trial) -> None:
        self._trial, self._waits = None, True
        self._cost_s = max(0.0, trial.lost_s)
        self._credit_s = min(0.0, self._credit_s - self._cost_s)
        if self.log_gain < -CONFIRM_STD_ERRORS * self.log_gain_error:
            self.in_force = not self.in_force
            self._credit_s = 0.0
