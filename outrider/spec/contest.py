"""Speculation against plain decoding: whichever emits more tokens per second is in force (pure).

Models of a round's cost are never complete: waiting, the host, other sessions. So the judge is
what sessions experience: tokens and seconds of their rounds, by mode. The mode that is not in
force is tried now and then, and what such a probe may lose is bounded: by BUDGET of the time
served since the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

BUDGET: Final = 0.01
"""Share of the time that probes may lose."""
HALF_LIFE: Final = 48.0
"""Rounds after which an observation counts half."""
STALE_ROUNDS: Final = 256.0
"""Rounds in the other mode after which what is known of a mode counts half."""
FIRST_PLAIN: Final = 8
"""Plain rounds to begin with where nobody has told what they take."""
PROBE_ROUNDS: Final = 6
LONG_PROBE_ROUNDS: Final = 24
"""What a probe is extended to while it loses next to nothing: few rounds tell little of tokens."""
SMALL_LOSS: Final = 1.5
"""Rounds of the mode in force that are next to nothing."""
ENOUGH_ROUNDS: Final = 3.0
"""Rounds in a mode before its rate may decide anything."""
START_MARGIN: Final = 1.03
"""What speculation must gain to be begun."""
DEFICIT_LIMIT: Final = 12.0
"""Plain rounds that speculation may fall behind, since it was last ahead, before it is left."""
UNKNOWN_LOSS: Final = 2.0
"""Rounds that a probe is thought to lose where none has been."""
LOSS_LIMIT: Final = 8.0
"""Rounds of the mode in force that a probe may lose before it is broken off."""


class Mode(StrEnum):
    """How sessions of one kind decode."""

    PLAIN = "plain"
    SPECULATE = "speculate"


class Reason(StrEnum):
    """Why a mode is in force."""

    MEASURING = "measuring"
    """Too little is known."""
    FASTER = "faster"
    """It emits more tokens per second than the other."""
    PROBE = "probe"
    """To see whether it has become faster than the other, for a few rounds."""


@dataclass(slots=True)
class Rate:
    """Tokens per second in one mode, weighted exponentially by rounds."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def observe(self, tokens: float, seconds: float, rounds: float) -> None:
        """`rounds` of one session took `seconds` together and emitted `tokens`; fractions are
        fine, so that all sessions of a kind can share one estimate."""
        self.fade(rounds / HALF_LIFE)
        self.tokens += tokens
        self.seconds += seconds
        self.rounds += rounds

    def fade(self, half_lives: float) -> None:
        """Count what is known less."""
        keep = 0.5**half_lives
        self.tokens *= keep
        self.seconds *= keep
        self.rounds *= keep

    @property
    def value(self) -> float:
        """Tokens per second of one session; nan while nothing is known."""
        return self.tokens / self.seconds if self.seconds > 0.0 else math.nan


@dataclass(slots=True)
class _Probe:
    mode: Mode
    rounds_left: float
    lost_s: float = 0.0
    first: bool = True


@dataclass(slots=True)
class Contest:
    """The mode of one kind of session at one load.

    `plain_round_s` is what a plain round takes, as far as a table knows; nan: it is measured first.
    """

    plain_round_s: float = math.nan
    begin_with: Mode | None = None
    """What a contest at another load found; None: measure at once."""
    _rates: dict[Mode, Rate] = field(default_factory=lambda: {mode: Rate() for mode in Mode})
    _mode: Mode = Mode.SPECULATE
    _probe: _Probe | None = None
    _credit_s: float = 0.0
    _cost_s: dict[Mode, float] = field(default_factory=dict)
    """What the last probe of a mode lost."""
    _measuring: bool = True
    _deficit_s: float = 0.0
    _told: bool = False
    """Whether all that is known of plain rounds is what the table says."""

    def __post_init__(self) -> None:
        if self.plain_round_s > 0.0:
            # Counts until there are real rounds: a table knows nothing of the host.
            self._rates[Mode.PLAIN] = Rate(1.0, self.plain_round_s, 1.0)
            self._told = True
        if self.begin_with is not None:
            self._mode, self._measuring = self.begin_with, False
        elif self._rates[Mode.PLAIN].rounds:
            self._probe = _Probe(Mode.SPECULATE, PROBE_ROUNDS)
            self._mode = Mode.PLAIN
        else:
            self._probe = _Probe(Mode.PLAIN, FIRST_PLAIN)

    @property
    def mode(self) -> Mode:
        """What sessions are to do now."""
        return self._mode if self._probe is None else self._probe.mode

    @property
    def settled_mode(self) -> Mode | None:
        """The mode found faster; None while too little is known."""
        return None if self._measuring else self._mode

    @property
    def reason(self) -> Reason:
        """Why."""
        if self._measuring:
            return Reason.MEASURING
        return Reason.FASTER if self._probe is None else Reason.PROBE

    @property
    def gain(self) -> float:
        """Tokens per second with speculation over those without; nan while one is unknown."""
        plain = self._rates[Mode.PLAIN].value
        return self._rates[Mode.SPECULATE].value / plain if plain > 0.0 else math.nan

    def observe(
        self, mode: Mode, tokens: float, seconds: float, rounds: float, *, settled: bool = True
    ) -> None:
        """Sessions did `rounds` in `mode`: `tokens` emitted in `seconds`, summed over sessions and
        divided by their number. Not `settled`: the first round after a change, which says more
        about the change than about the mode."""
        if not (seconds > 0.0 and rounds > 0.0):
            return
        if self._told and mode is Mode.PLAIN and settled:
            self._rates[Mode.PLAIN], self._told = Rate(), False
        probe = self._probe
        if probe is not None and probe.mode is mode:
            self._probed(probe, tokens, seconds, rounds, settled)
            return
        if settled:
            self._rates[mode].observe(tokens, seconds, rounds)
        if probe is None and mode is self._mode:
            other = _other(mode)
            self._rates[other].fade(rounds / STALE_ROUNDS)
            self._credit_s += BUDGET * seconds
            if mode is Mode.SPECULATE and self._plain_is_hearsay:
                if self._rates[mode].rounds >= ENOUGH_ROUNDS:
                    self._measure_plain()
                return
            if mode is Mode.SPECULATE:
                self._fall_behind(tokens, seconds)
            other = _other(self._mode)
            if self._credit_s >= self._price(other):
                self._probe = _Probe(other, PROBE_ROUNDS)

    @property
    def _plain_is_hearsay(self) -> bool:
        """Whether no plain round at this load was seen: drafts are not judged by that."""
        return self._told or not self._rates[Mode.PLAIN].rounds

    def _price(self, mode: Mode) -> float:
        """Seconds that a probe of `mode` may be expected to lose."""
        usual = self._rates[self._mode]
        a_round = usual.seconds / usual.rounds if usual.rounds else math.inf
        return max(self._cost_s.get(mode, UNKNOWN_LOSS * a_round), 0.5 * a_round)

    def _probed(
        self, probe: _Probe, tokens: float, seconds: float, rounds: float, settled: bool
    ) -> None:
        usual = self._rates[_other(probe.mode)]
        if usual.value > 0.0:
            probe.lost_s += seconds - tokens / usual.value
        if settled or not probe.first:
            self._rates[probe.mode].observe(tokens, seconds, rounds)
        probe.first = probe.first and not settled
        probe.rounds_left -= rounds
        lost_rounds = probe.lost_s * usual.rounds / usual.seconds if usual.seconds > 0.0 else 0.0
        broken = lost_rounds > LOSS_LIMIT
        if broken and self._rates[probe.mode].rounds < 1.0:
            # Nothing but the change itself was seen, and that was bad enough.
            self._rates[probe.mode].observe(tokens, seconds, rounds)
        # By a table alone no loss is small.
        cheap = usual.rounds > 0.0 and not self._told and lost_rounds < SMALL_LOSS
        last = PROBE_ROUNDS - LONG_PROBE_ROUNDS if cheap else 0
        if broken or probe.rounds_left <= last:
            self._end(probe, broken)

    def _end(self, probe: _Probe, broken: bool) -> None:
        self._probe = None
        lost = max(0.0, probe.lost_s)
        self._cost_s[probe.mode] = lost
        self._credit_s = min(0.0, self._credit_s - lost)
        if self._measuring and probe.mode is Mode.PLAIN and not self._rates[Mode.SPECULATE].rounds:
            self._mode = Mode.PLAIN
            self._probe = _Probe(Mode.SPECULATE, PROBE_ROUNDS)
            return
        if self._told and not broken:
            # Drafts were no worse than a table: plain rounds have yet to show what they are.
            self._mode = Mode.SPECULATE
            self._measure_plain()
            return
        if self._measuring and probe.mode is Mode.PLAIN:
            # Whatever began owes nothing to having begun.
            self._mode = Mode.PLAIN
        self._measuring = False
        self._judge(enough=0.0 if broken else ENOUGH_ROUNDS)

    def _measure_plain(self) -> None:
        """See what plain rounds are, and forget what was said of them."""
        self._rates[Mode.PLAIN], self._told, self._measuring = Rate(), False, True
        self._probe = _Probe(Mode.PLAIN, FIRST_PLAIN)

    def _judge(self, enough: float = ENOUGH_ROUNDS) -> None:
        """Leave plain decoding for drafts that were found faster."""
        plain, drafts = self._rates[Mode.PLAIN], self._rates[Mode.SPECULATE]
        if self._mode is not Mode.PLAIN or plain.rounds <= 0.0 or drafts.rounds < enough:
            return
        if drafts.value > START_MARGIN * plain.value:
            self._mode, self._deficit_s = Mode.SPECULATE, 0.0

    def _fall_behind(self, tokens: float, seconds: float) -> None:
        """Leave speculation when it has lost too much since it was last ahead of plain decoding.

        Sums tell a slow decline and a sudden one apart from bad luck sooner than a mean does.
        """
        plain = self._rates[Mode.PLAIN]
        if not plain.value > 0.0:
            return
        self._deficit_s = max(0.0, self._deficit_s + seconds - tokens / plain.value)
        if self._deficit_s * plain.rounds > DEFICIT_LIMIT * plain.seconds:
            self._mode, self._deficit_s = Mode.PLAIN, 0.0
            # The times when it was ahead are over; a probe will tell when they are back.
            self._rates[Mode.SPECULATE] = Rate()


def _other(mode: Mode) -> Mode:
    return Mode.PLAIN if mode is Mode.SPECULATE else Mode.SPECULATE
