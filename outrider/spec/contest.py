"""Speculation against plain decoding: whichever emits more tokens per second is in force (pure).

Models of a round's cost are never complete: waiting, the host, other sessions. So the judge is
what sessions experience: tokens and seconds of their rounds, by mode. It begins with speculation
and leaves it on solid evidence only: so many rounds of both modes, and a margin. The mode that is
not in force is tried now and then, and what such a probe may lose is bounded: by BUDGET of the
time served since the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

BUDGET: Final = 0.005
"""Share of the time that probes may lose."""
HALF_LIFE: Final = 48.0
"""Rounds after which an observation counts half."""
STALE_ROUNDS: Final = 256.0
"""Rounds in the other mode after which what is known of a mode counts half."""
SOLID_ROUNDS: Final = 16.0
"""Rounds of both modes before speculation may be left."""
PROBE_ROUNDS: Final = 6.0
LONG_PROBE_ROUNDS: Final = 24.0
"""What a probe is extended to while it loses next to nothing: few rounds tell little of tokens."""
SMALL_LOSS: Final = 1.5
"""Rounds of the mode in force that are next to nothing."""
ENOUGH_ROUNDS: Final = 3.0
"""Rounds of speculation before its rate may end plain decoding."""
MARGIN: Final = 1.03
"""What the other mode must gain to be begun."""
CLEAR_GAIN: Final = 1.3
"""Speed relative to plain decoding that other loads are thought to share."""
DEFICIT_LIMIT: Final = 12.0
"""Plain rounds that speculation may fall behind, since it was last ahead, before it is doubted."""
LOSS_LIMIT: Final = 8.0
PLAIN_LOSS_LIMIT: Final = 4.0
"""Rounds of the mode in force that a probe of drafts, or of plain rounds, may lose before it is
broken off."""
OUTLIER: Final = 4.0
"""Usual rounds that one round counts as at most: a stall says nothing of a mode."""


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

    @property
    def round_s(self) -> float:
        """Mean seconds of a round; infinite while nothing is known."""
        return self.seconds / self.rounds if self.rounds > 0.0 else math.inf


@dataclass(slots=True)
class _Probe:
    mode: Mode
    rounds_left: float
    usual: Rate
    """Of the mode that the probe interrupts."""
    doubts: bool = False
    """Whether speculation is left if plain rounds turn out faster; else they are but refreshed."""
    lost_s: float = 0.0
    first: bool = True


@dataclass(slots=True)
class Contest:
    """The mode of one kind of session at one load."""

    sure: bool = False
    """Whether speculation was found to win by far at another load: then a probe that is paid for
    is soon enough to see what plain rounds take at this one."""
    _rates: dict[Mode, Rate] = field(default_factory=lambda: {mode: Rate() for mode in Mode})
    _mode: Mode = Mode.SPECULATE
    _probe: _Probe | None = None
    _measuring: bool = field(default=True, init=False)
    _credit_s: float = 0.0
    _cost_s: dict[Mode, float] = field(default_factory=dict)
    """What the last probe of a mode lost."""
    _deficit_s: float = 0.0
    _behind: Rate = field(default_factory=Rate)
    """Speculation since it was last ahead of plain decoding."""

    def __post_init__(self) -> None:
        self._measuring = not self.sure

    @property
    def wins(self) -> bool:
        """Whether speculation is in force and was found to win by far."""
        return self._mode is Mode.SPECULATE and self.gain > CLEAR_GAIN

    @property
    def mode(self) -> Mode:
        """What sessions are to do now."""
        return self._mode if self._probe is None else self._probe.mode

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
        rate = self._rates[mode]
        if rate.rounds >= ENOUGH_ROUNDS:
            seconds = min(seconds, OUTLIER * rounds * rate.round_s)
        probe = self._probe
        if probe is not None and probe.mode is mode:
            self._probed(probe, tokens, seconds, rounds, settled)
            return
        if settled:
            rate.observe(tokens, seconds, rounds)
        if probe is None and mode is self._mode:
            self._credit_s += BUDGET * seconds
            self._rates[_other(mode)].fade(rounds / STALE_ROUNDS)
            if settled:
                self._went_on(mode, tokens, seconds, rounds)
            elif rate.value > 0.0:
                # Coming back is part of what a probe costs.
                self._credit_s -= max(0.0, seconds - tokens / rate.value)

    def _went_on(self, mode: Mode, tokens: float, seconds: float, rounds: float) -> None:
        """See whether it is time to try the other mode."""
        if mode is Mode.SPECULATE:
            if self._measuring:
                if self._rates[mode].rounds >= SOLID_ROUNDS:
                    self._doubt(self._rates[mode])
                return
            self._fall_behind(tokens, seconds, rounds)
        if self._probe is None and self._credit_s >= self._price(_other(mode)):
            self._probe = _Probe(_other(mode), PROBE_ROUNDS, self._rates[mode])

    def _doubt(self, usual: Rate) -> None:
        """Compare speculation, as `usual` tells it, with plain rounds of right now."""
        self._rates[Mode.PLAIN] = Rate()
        self._probe = _Probe(Mode.PLAIN, SOLID_ROUNDS, usual, doubts=True)

    def _fall_behind(self, tokens: float, seconds: float, rounds: float) -> None:
        """Doubt speculation when it has lost too much since it was last ahead of plain decoding.

        Sums tell a slow decline and a sudden one apart from bad luck sooner than a mean does.
        """
        plain = self._rates[Mode.PLAIN]
        if not plain.value > 0.0:
            return
        self._deficit_s += seconds - tokens / plain.value
        if self._deficit_s <= 0.0:
            self._deficit_s, self._behind = 0.0, Rate()
            return
        self._behind.observe(tokens, seconds, rounds)
        lost = self._deficit_s > DEFICIT_LIMIT * plain.round_s
        if lost and self._behind.rounds >= SOLID_ROUNDS:
            self._doubt(self._behind)

    def _price(self, mode: Mode) -> float:
        """Seconds that a probe of `mode` may be expected to lose."""
        usual = self._rates[self._mode]
        if not usual.rounds:
            return math.inf
        return max(self._cost_s.get(mode, 2.0 * usual.round_s), 0.5 * usual.round_s)

    def _probed(
        self, probe: _Probe, tokens: float, seconds: float, rounds: float, settled: bool
    ) -> None:
        usual = probe.usual
        if usual.value > 0.0:
            probe.lost_s += seconds - tokens / usual.value
        if settled or not probe.first:
            self._rates[probe.mode].observe(tokens, seconds, rounds)
            probe.rounds_left -= rounds
        probe.first = probe.first and not settled
        lost_rounds = probe.lost_s / usual.round_s
        limit = PLAIN_LOSS_LIMIT if probe.mode is Mode.PLAIN else LOSS_LIMIT
        broken = lost_rounds > limit
        if broken and self._rates[probe.mode].rounds < 1.0:
            # Nothing but the change itself was seen, and that was bad enough.
            self._rates[probe.mode].observe(tokens, seconds, rounds)
        cheap = probe.mode is Mode.SPECULATE and lost_rounds < SMALL_LOSS
        last = PROBE_ROUNDS - LONG_PROBE_ROUNDS if cheap else 0.0
        if broken or probe.rounds_left <= last:
            self._end(probe, broken)

    def _end(self, probe: _Probe, broken: bool) -> None:
        self._probe = None
        lost = max(0.0, probe.lost_s)
        self._cost_s[probe.mode] = lost
        self._credit_s = min(0.0, self._credit_s - lost)
        plain, drafts = self._rates[Mode.PLAIN], self._rates[Mode.SPECULATE]
        if probe.mode is Mode.SPECULATE:
            enough = drafts.rounds >= ENOUGH_ROUNDS and plain.rounds > 0.0
            if enough and not broken and drafts.value > MARGIN * plain.value:
                self._mode = Mode.SPECULATE
            return
        self._measuring = False
        if not probe.doubts:
            return
        self._deficit_s, self._behind = 0.0, Rate()
        if not broken and plain.value > MARGIN * probe.usual.value:
            self._mode = Mode.PLAIN
            # The times when it was ahead are over; a probe will tell when they are back.
            self._rates[Mode.SPECULATE] = Rate()


def _other(mode: Mode) -> Mode:
    return Mode.PLAIN if mode is Mode.SPECULATE else Mode.SPECULATE
