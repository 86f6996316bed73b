"""Speculation controller: speculation or plain decoding, by measured tokens per second. Pure.

Models of a round's cost are never complete (waiting, the host, other sessions), so the controller
decides by what sessions experience: end-to-end round times and emitted tokens. It begins with
speculation, or with the mode in force at the nearest load, and leaves speculation when that has
fallen behind plain decoding by some rounds' time. The time of plain rounds is measured, or taken
from cost tables until it is; before speculation is left, current plain rounds confirm it. The mode
that is not in force is probed from time to time, and the loss of a probe is bounded by a share of
the time served since the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.spec.decoding_mode import DecodingMode, DecodingModeReason
from outrider.speculation.deficit import MIN_JUDGED_ROUNDS, SpeculationDeficit
from outrider.speculation.loss_allowance import SessionGains
from outrider.speculation.measurements import (
    MIN_STD_ERRORS,
    EmissionStats,
    RoundObservation,
    RoundTimeWindow,
    StallDetector,
)
from outrider.speculation.probe import (
    FIRST_PLAIN_ROUNDS,
    MAX_LOSS_ROUNDS,
    PROBE_ROUNDS,
    RECHECK_PROBE_ROUNDS,
    ModeProbe,
)
from outrider.speculation.probe_costs import ProbeCosts
from outrider.speculation.trial_preparation import (
    LOST_ELIGIBLE_SHARE,
    MIN_ELIGIBLE_SHARE,
    TrialPreparation,
)

PROBE_BUDGET: Final = 0.005
"""Share of the time that probes may lose."""
REDUCED_PROBE_BUDGET: Final = 0.01
"""The same where bad luck may have ended speculation."""
HALF_LIFE_ROUNDS: Final = 48.0
"""Rounds after which an emission counts half."""
FIRST_MEASURE_ROUNDS: Final = 8.0
"""Rounds of speculation before plain ones are measured, where nothing else tells of these."""
REMEASURE_ROUNDS: Final = 12.0
"""Rounds of speculation after which plain ones are measured where they were only expected,"""
REMEASURE_LONG_ROUNDS: Final = 48.0
CLEAR_WIN: Final = 1.6
"""or after so many where speculation gains so much that it hardly matters what they take."""
WORTHLESS_TOKENS: Final = 1.05
"""Tokens a row below which drafts can win nothing, however little they cost: rows that wait for
them neither run ahead nor let prompts in as others do."""
WORTHLESS_ROUNDS: Final = 8.0
"""Rounds before that is judged."""
MIN_PROBE_COST: Final = 0.5
"""Rounds of the mode in force that any probe counts as."""
WORTHLESS_PROBE_COST: Final = 4.0
"""Plain rounds that another look at such drafts counts as: it loses little that is measured."""
MIN_ROUNDS: Final = 3.0
"""Rounds of speculation before its rate may end plain decoding."""
MIN_GAIN: Final = 1.03
"""What speculation must gain to be begun again."""
PROVEN_ROUNDS: Final = 32.0
PROVEN_GAIN: Final = 1.1
"""Rounds and speed relative to plain decoding after which speculation is trusted for longer."""
LOSS_STD_ERRORS: Final = 2.5
"""Standard errors beyond which it is not bad luck that drafts lose."""
GAIN_PER_HALVING: Final = 1.2
"""What drafts may gain with every halving of the load: device and exchange have less to do."""
MIN_EASY_TOKENS: Final = 1.5
"""Tokens a row without which a lower load is no reason to try."""
CONFIRM_STD_ERRORS: Final = 1.0
"""Standard errors by which plain rounds of right now must bear out a doubt."""
CLEAR_GAIN: Final = 1.3
"""Speed relative to plain decoding that other loads are thought to share."""


@dataclass(slots=True)
class SpeculationController:
    """Chooses speculation or plain decoding for one workload class at one load."""

    expected_plain_s: float = math.nan
    """What a plain round is thought to take until any was seen; nan: nothing tells."""
    preparation_s: float = 0.0
    """What it costs sessions to be able to speculate, before it is tried."""
    active_mode: DecodingMode = DecodingMode.SPECULATE
    """The mode of now, probes aside."""
    _plain: RoundTimeWindow = field(default_factory=RoundTimeWindow)
    _drafts: RoundTimeWindow = field(default_factory=RoundTimeWindow)
    _stood: EmissionStats = field(default_factory=EmissionStats)
    """Of rounds with drafts."""
    _behind: SpeculationDeficit = field(default_factory=SpeculationDeficit)
    _stalls: StallDetector = field(default_factory=StallDetector)
    _probe: ModeProbe | None = None
    _decided: bool = False
    _proven: bool = False
    """Whether drafts were well ahead once: so they are trusted for longer."""
    _winnings: SessionGains = field(default_factory=SessionGains)
    """For the texts of sessions that are alone."""
    _thought: float = math.nan
    """The gain that another load makes likely."""
    _thin: bool = False
    """Whether bad luck may have ended speculation."""
    _gathering: TrialPreparation = field(default_factory=TrialPreparation)
    _credit_s: float = 0.0
    _prices: ProbeCosts = field(default_factory=ProbeCosts)
    _found: bool = False
    """Whether plain decoding was found to be faster here, and not only at another load."""

    @classmethod
    def from_other_load(
        cls, other: SpeculationController, halvings: int = 0
    ) -> SpeculationController:
        """The speculation controller at a load at which nothing is known, by that at the nearest
        one, which is `halvings` higher (negative: lower)."""
        stood = EmissionStats(other._stood.rows, other._stood.tokens, other._stood.squares)
        stood.rounds = other._stood.rounds
        new = cls(
            active_mode=other.active_mode, _stood=stood, _decided=other._decided, _thin=other._thin
        )
        new._proven = other._proven and other.gain > CLEAR_GAIN
        new._thought = other.estimated_gain * GAIN_PER_HALVING ** max(0, halvings)
        if halvings > 0 and new._thought > 1.0 and stood.mean > MIN_EASY_TOKENS:
            new.active_mode = DecodingMode.SPECULATE
        new._winnings = SessionGains.from_other_load(
            other._winnings, plain=new.active_mode is DecodingMode.PLAIN
        )
        new._prices = ProbeCosts.from_other_load(other._prices, halvings)
        return new

    @property
    def is_decided(self) -> bool:
        """Whether enough is known for a verdict."""
        return self._decided

    @property
    def is_plain_faster(self) -> bool:
        """Whether plain decoding is in force, and was found to be faster at this very load."""
        return self._found and self.active_mode is DecodingMode.PLAIN

    @property
    def is_plain_in_force(self) -> bool:
        """Whether plain decoding is in force and was run at this very load, and nothing else is
        being tried."""
        return (
            self.active_mode is DecodingMode.PLAIN
            and not self.is_probing
            and self.has_compared_modes
        )

    @property
    def current_mode(self) -> DecodingMode:
        """What sessions are to do now."""
        return self.active_mode if self._probe is None else self._probe.mode

    @property
    def decision_reason(self) -> DecodingModeReason:
        """Why."""
        if not self._decided:
            return DecodingModeReason.MEASURING
        return DecodingModeReason.FASTER if self._probe is None else DecodingModeReason.PROBE

    @property
    def is_probing(self) -> bool:
        """Whether the other mode is being tried."""
        return self._probe is not None

    @property
    def gain(self) -> float:
        """Tokens per second with speculation over those without; nan while one is unknown."""
        return self._stood.mean * self.plain_round_s / self._drafts.mean_s

    @property
    def estimated_gain(self) -> float:
        """`gain`, or what another load makes likely; nan: nothing does."""
        return self._thought if math.isnan(self.gain) else self.gain

    @property
    def plain_round_s(self) -> float:
        """Seconds of a plain round, as measured or else expected; nan: unknown."""
        measured = self._plain.mean_s
        return self.expected_plain_s if math.isnan(measured) else measured

    @property
    def _usual_s(self) -> float:
        """Seconds of a round in the mode in force; nan: unknown."""
        return self._plain.mean_s if self.active_mode is DecodingMode.PLAIN else self._drafts.mean_s

    def begin_session(self) -> None:
        """Another session begins, alone: if drafts have won more than they lost, it begins with
        them and is judged by what its own text gives."""
        if not self._winnings.can_spend or self._probe is not None:
            return
        if self.active_mode is DecodingMode.SPECULATE:
            self._begin_anew()
        else:
            self.active_mode = DecodingMode.SPECULATE
            self._forget_drafts()

    def reset_draft_statistics(self) -> None:
        """Drafts are made another way from now on: whatever those before them gave, they get a
        chance."""
        self.active_mode = DecodingMode.SPECULATE
        self._winnings.reset()
        self._forget_drafts()

    def observe_round(self, mode: DecodingMode, seen: RoundObservation) -> None:
        """Sessions decoded in `mode`."""
        if not (seen.rows > 0 and seen.seconds > 0.0):
            return
        probe = self._probe
        if probe is not None:
            if probe.mode is mode:
                self._probed(probe, seen)
            elif mode is DecodingMode.PLAIN and seen.eligible_share < LOST_ELIGIBLE_SHARE:
                # Nobody is left to try it with.
                self._probe = None
        elif mode is self.active_mode:
            self._went_on(mode, seen)

    def _went_on(self, mode: DecodingMode, seen: RoundObservation) -> None:
        """A round in the mode in force: see whether it is time to try the other one."""
        usual_s = self._usual_s
        if not math.isnan(usual_s):
            # Usual rounds count: a stall pays for no probe.
            served_s = seen.weight * seen.rounds * usual_s
            self._credit_s += (REDUCED_PROBE_BUDGET if self._thin else PROBE_BUDGET) * served_s
        if not seen.is_load_steady:
            # Coming back is part of what a probe costs.
            lost_s = max(0.0, self._lost_s(mode, seen))
            self._credit_s -= lost_s
            self._win(-lost_s, seen)
            return
        if mode is DecodingMode.PLAIN:
            self._note_plain(seen)
            self._winnings.add_plain_rounds(seen.weight * seen.rounds)
        else:
            if self._stalls.is_stall(seen, self._drafts):
                seen = replace(seen, is_timed=False)
            self._note_drafts(seen)
            if self._worthless:
                self._leave()
                return
            self._fall_behind(seen)
        if self._probe is not None:
            return
        share = self._gathering.cost_share
        # The least price that there is first: mostly not even that is there.
        affordable = self._credit_s >= MIN_PROBE_COST * usual_s * share
        affordable = affordable and self._credit_s >= self._price(mode.other, seen) * share
        if affordable and mode is DecodingMode.PLAIN and seen.eligible_share < MIN_ELIGIBLE_SHARE:
            if not self._gathering.extend_wait(seen):
                self._credit_s = 0.0
            return
        self._gathering.cancel()
        if affordable:
            if mode is DecodingMode.PLAIN:
                self._forget_drafts()
            self._probe = ModeProbe(mode.other, PROBE_ROUNDS)
        elif mode is DecodingMode.SPECULATE and self._unchecked:
            self._probe = ModeProbe(DecodingMode.PLAIN, FIRST_PLAIN_ROUNDS)

    @property
    def is_probe_due(self) -> bool:
        """Whether speculation is to be tried as soon as enough sessions are able to."""
        return self._gathering.is_due

    @property
    def has_compared_modes(self) -> bool:
        """Whether plain rounds were run here, so that its verdict is its own."""
        return self._plain.rounds > 0.0

    @property
    def _unchecked(self) -> bool:
        """Whether what plain rounds are expected to take decides, and none was ever run here."""
        if self._plain.rounds or self._drafts.rounds < REMEASURE_ROUNDS:
            return False
        return self.gain < CLEAR_WIN or self._stood.rounds >= REMEASURE_LONG_ROUNDS

    def _note_plain(self, seen: RoundObservation) -> None:
        if seen.is_timed:
            self._plain.observe_round(seen.round_s, seen.rounds)

    def _note_drafts(self, seen: RoundObservation) -> None:
        self._stood.decay(seen.rounds / HALF_LIFE_ROUNDS)
        self._stood.add_observation(seen)
        if seen.is_timed:
            self._drafts.observe_round(seen.round_s, seen.rounds)
        if self._stood.rounds >= PROVEN_ROUNDS / 2.0 and not math.isnan(self.gain):
            self._decided = True
            self._proven = self._proven or (
                self._stood.rounds >= PROVEN_ROUNDS and self.gain > PROVEN_GAIN
            )

    def _fall_behind(self, seen: RoundObservation) -> None:
        """Doubt speculation when it has lost too much since it was last ahead of plain decoding."""
        behind, plain_s = self._behind, self.plain_round_s
        behind.observe_round(seen)
        if math.isnan(plain_s):
            if (
                behind.emitted.rounds >= FIRST_MEASURE_ROUNDS
                and behind.times.rounds > MIN_JUDGED_ROUNDS
            ):
                self._doubt()
            return
        # Without a time of its own a round is taken to have lasted as long as others.
        took_s = self._drafts.clip_outlier(seen.round_s) if seen.is_timed else self._drafts.mean_s
        if math.isnan(took_s):
            return
        lost = seen.rounds * (took_s / plain_s - seen.tokens / seen.rows)
        self._win(-lost * plain_s, seen)
        if not behind.add_loss(lost):
            self._begin_anew()
        elif behind.is_uncertain(plain_s, proven=self._proven or self.gain > 1.0):
            self._doubt()

    def _win(self, seconds: float, seen: RoundObservation) -> None:
        """Speculation has won so much time in a round, negative: lost; a stall says nothing of it,
        noticed as one or not."""
        if seen.is_timed and self.plain_round_s > 0.0:
            self._winnings.add_rounds(
                max(seconds / self.plain_round_s, -MAX_LOSS_ROUNDS * seen.rounds)
            )

    @property
    def _worthless(self) -> bool:
        """Whether hardly a draft token stands, chance aside."""
        if self._stood.rounds < WORTHLESS_ROUNDS:
            return False
        return (
            self._stood.mean + MIN_STD_ERRORS * math.sqrt(self._stood.variance) < WORTHLESS_TOKENS
        )

    def _doubt(self) -> None:
        """Compare speculation with plain rounds of right now."""
        self._plain.clear()
        self._probe = ModeProbe(DecodingMode.PLAIN, RECHECK_PROBE_ROUNDS, is_recheck=True)

    def _forget_drafts(self) -> None:
        self._drafts.clear()
        self._stood = EmissionStats()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._gathering.cancel()
        self._behind = SpeculationDeficit()

    def _lost_s(self, mode: DecodingMode, seen: RoundObservation) -> float:
        """Seconds of a session that this round took longer than the usual ones of `mode`."""
        if mode is DecodingMode.PLAIN:
            lost = seen.round_s - self.plain_round_s
        else:
            lost = seen.round_s - seen.tokens / seen.rows / self._stood.mean * self._drafts.mean_s
        return 0.0 if math.isnan(lost) else lost * seen.rounds

    def _price(self, mode: DecodingMode, seen: RoundObservation) -> float:
        """Seconds that a probe of `mode` may be expected to lose; `seen`: the last round."""
        usual_s = self._usual_s
        if math.isnan(usual_s):
            return math.inf
        lost_s = self._prices.expected_loss_s(mode, usual_s=usual_s, sessions=seen.sessions)
        if mode is DecodingMode.SPECULATE and not math.isnan(self.gain):
            # What the drafts were when they were left tells it before the first probe does.
            lost_s = max(lost_s, MIN_ROUNDS * self._drafts.mean_s * (1.0 - self.gain))
            if self._worthless:
                lost_s = max(lost_s, WORTHLESS_PROBE_COST * usual_s)
        return max(lost_s, MIN_PROBE_COST * usual_s) + self.preparation_s * (
            mode is DecodingMode.SPECULATE
        )

    def _probed(self, probe: ModeProbe, seen: RoundObservation) -> None:
        """A round in the mode that is being tried."""
        usual_s = self._usual_s
        probe.add_loss(
            seen, usual_s, 1.0 if self.active_mode is DecodingMode.PLAIN else self._stood.mean
        )
        if probe.count_round(seen):
            if probe.mode is DecodingMode.PLAIN:
                self._note_plain(seen)
            else:
                self._note_drafts(seen)
                self._behind.emitted.add_observation(seen)
                took_s = self._drafts.clip_outlier(seen.round_s)
                self._win(seen.rounds * (seen.tokens / seen.rows * usual_s - took_s), seen)
        broken = probe.is_too_expensive(usual_s) or self._hopeless(probe)
        if broken or probe.is_over(usual_s) or (probe.has_won and self._succeeded(probe)):
            self._end(probe, broken)

    def _hopeless(self, probe: ModeProbe) -> bool:
        """Whether the drafts that are being tried cannot be worth it any more."""
        if probe.mode is DecodingMode.PLAIN or not self._drafts.rounds > MIN_JUDGED_ROUNDS:
            return False
        if self._worthless:
            return True
        needed = self._drafts.mean_s / self.plain_round_s
        hopeless = self._behind.emitted.is_below(needed, sure=LOSS_STD_ERRORS)
        self._thin = self._thin and not hopeless
        return hopeless

    def _succeeded(self, probe: ModeProbe) -> bool:
        """Whether speculation, being tried, is seen to be faster."""
        enough = probe.mode is DecodingMode.SPECULATE and self._drafts.rounds >= MIN_ROUNDS
        return enough and self.gain > MIN_GAIN

    def _end(self, probe: ModeProbe, broken: bool) -> None:
        self._probe = None
        lost = max(0.0, probe.lost_s)
        self._prices.record_loss(probe.mode, lost)
        self._credit_s = min(0.0, self._credit_s - lost)
        if probe.mode is DecodingMode.SPECULATE:
            if not broken and self._succeeded(probe):
                self.active_mode = DecodingMode.SPECULATE
            else:
                self._found = True
            self._begin_anew()
            return
        if not probe.is_recheck:
            return
        self._decided = True
        behind, plain_s = self._behind, self.plain_round_s
        emitted, needed = behind.emitted, behind.needed_tokens(plain_s)
        # Now it is known what plain rounds take.
        self._winnings.add_rounds(behind.deficit - emitted.rounds * (needed - emitted.mean))
        if not broken and behind.is_below(plain_s, sure=CONFIRM_STD_ERRORS):
            self.active_mode, self._found = DecodingMode.PLAIN, True
            self._winnings.record_failure(emitted, needed)
            self._thin = not behind.is_below(plain_s, sure=LOSS_STD_ERRORS)
            # The times when it was ahead are over.
            self._stood, self._drafts = emitted, behind.times
        self._begin_anew()

    def _leave(self) -> None:
        """Decode plainly, without a comparison: there is nothing to compare."""
        self.active_mode, self._decided, self._thin = DecodingMode.PLAIN, True, False
        self._found = True
        self._credit_s = min(0.0, self._credit_s)
        self._winnings.record_failure(self._stood, math.inf)
        self._begin_anew()
