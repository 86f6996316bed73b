"""Speculation against plain decoding: whichever emits more tokens per second is in force (pure).

Models of a round's cost are never complete: waiting, the host, other sessions. So the judge is
what sessions experience: what their rounds take, end to end, and what these emit. It begins with
speculation, or with what was in force at the nearest load, and leaves speculation when that has
fallen behind plain decoding by some rounds' time. What plain rounds take is measured, or expected
of tables until it is; before speculation is left, plain rounds of right then confirm it. The mode
that is not in force is tried now and then, and what such a probe may lose is bounded: by a share
of the time served since the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from outrider.spec.decoding_mode import Mode, Reason
from outrider.speculation.deficit import LEAST_ROUNDS, Behind
from outrider.speculation.loss_allowance import Winnings
from outrider.speculation.measurements import SURE, Emitted, RoundTimes, Seen, Stalls
from outrider.speculation.probe import CHECK_ROUNDS, DOUBT_ROUNDS, LOSS_LIMIT, PROBE_ROUNDS, Probe
from outrider.speculation.probe_costs import Prices
from outrider.speculation.trial_preparation import ABLE, LEAST_ABLE, Gathering

BUDGET: Final = 0.005
"""Share of the time that probes may lose."""
THIN_BUDGET: Final = 0.01
"""The same where bad luck may have ended speculation."""
HALF_LIFE: Final = 48.0
"""Rounds after which an emission counts half."""
BLIND_ROUNDS: Final = 8.0
"""Rounds of speculation before plain ones are measured, where nothing else tells of these."""
UNCHECKED_ROUNDS: Final = 12.0
"""Rounds of speculation after which plain ones are measured where they were only expected,"""
UNCHECKED_LONG: Final = 48.0
CLEAR_WIN: Final = 1.6
"""or after so many where speculation gains so much that it hardly matters what they take."""
WORTHLESS: Final = 1.05
"""Tokens a row below which drafts can win nothing, however little they cost: rows that wait for
them neither run ahead nor let prompts in as others do."""
WORTHLESS_ROUNDS: Final = 8.0
"""Rounds before that is judged."""
LEAST_PRICE: Final = 0.5
"""Rounds of the mode in force that any probe counts as."""
WORTHLESS_PRICE: Final = 4.0
"""Plain rounds that another look at such drafts counts as: it loses little that is measured."""
ENOUGH_ROUNDS: Final = 3.0
"""Rounds of speculation before its rate may end plain decoding."""
MARGIN: Final = 1.03
"""What speculation must gain to be begun again."""
PROVEN_ROUNDS: Final = 32.0
PROVEN_GAIN: Final = 1.1
"""Rounds and speed relative to plain decoding after which speculation is trusted for longer."""
SURE_LOSS: Final = 2.5
"""Standard errors beyond which it is not bad luck that drafts lose."""
EASIER: Final = 1.2
"""What drafts may gain with every halving of the load: device and exchange have less to do."""
EASY_TOKENS: Final = 1.5
"""Tokens a row without which a lower load is no reason to try."""
CONFIRMED: Final = 1.0
"""Standard errors by which plain rounds of right now must bear out a doubt."""
CLEAR_GAIN: Final = 1.3
"""Speed relative to plain decoding that other loads are thought to share."""


@dataclass(slots=True)
class Contest:
    """The mode of one kind of session at one load."""

    expected_s: float = math.nan
    """What a plain round is thought to take until any was seen; nan: nothing tells."""
    ready_s: float = 0.0
    """What it costs sessions to be able to speculate, before it is tried."""
    in_force: Mode = Mode.SPECULATE
    """The mode of now, probes aside."""
    _plain: RoundTimes = field(default_factory=RoundTimes)
    _drafts: RoundTimes = field(default_factory=RoundTimes)
    _stood: Emitted = field(default_factory=Emitted)
    """Of rounds with drafts."""
    _behind: Behind = field(default_factory=Behind)
    _stalls: Stalls = field(default_factory=Stalls)
    _probe: Probe | None = None
    _decided: bool = False
    _proven: bool = False
    """Whether drafts were well ahead once: so they are trusted for longer."""
    _winnings: Winnings = field(default_factory=Winnings)
    """For the texts of sessions that are alone."""
    _thought: float = math.nan
    """The gain that another load makes likely."""
    _thin: bool = False
    """Whether bad luck may have ended speculation."""
    _gathering: Gathering = field(default_factory=Gathering)
    _credit_s: float = 0.0
    _prices: Prices = field(default_factory=Prices)
    _found: bool = False
    """Whether plain decoding was found to be faster here, and not only at another load."""

    @classmethod
    def beside(cls, other: Contest, halvings: int = 0) -> Contest:
        """The contest at a load at which nothing is known, by that at the nearest one, which is
        `halvings` higher (negative: lower)."""
        stood = Emitted(other._stood.rows, other._stood.tokens, other._stood.squares)
        stood.rounds = other._stood.rounds
        new = cls(in_force=other.in_force, _stood=stood, _decided=other._decided, _thin=other._thin)
        new._proven = other._proven and other.gain > CLEAR_GAIN
        new._thought = other.believed * EASIER ** max(0, halvings)
        if halvings > 0 and new._thought > 1.0 and stood.mean > EASY_TOKENS:
            new.in_force = Mode.SPECULATE
        new._winnings = Winnings.beside(other._winnings, plain=new.in_force is Mode.PLAIN)
        new._prices = Prices.beside(other._prices, halvings)
        return new

    @property
    def decided(self) -> bool:
        """Whether enough is known for a verdict."""
        return self._decided

    @property
    def found_plain(self) -> bool:
        """Whether plain decoding is in force, and was found to be faster at this very load."""
        return self._found and self.in_force is Mode.PLAIN

    @property
    def holds_plain(self) -> bool:
        """Whether plain decoding is in force and was run at this very load, and nothing else is
        being tried."""
        return self.in_force is Mode.PLAIN and not self.trying and self.compared

    @property
    def mode(self) -> Mode:
        """What sessions are to do now."""
        return self.in_force if self._probe is None else self._probe.mode

    @property
    def reason(self) -> Reason:
        """Why."""
        if not self._decided:
            return Reason.MEASURING
        return Reason.FASTER if self._probe is None else Reason.PROBE

    @property
    def trying(self) -> bool:
        """Whether the other mode is being tried."""
        return self._probe is not None

    @property
    def gain(self) -> float:
        """Tokens per second with speculation over those without; nan while one is unknown."""
        return self._stood.mean * self.plain_s / self._drafts.mean_s

    @property
    def believed(self) -> float:
        """`gain`, or what another load makes likely; nan: nothing does."""
        return self._thought if math.isnan(self.gain) else self.gain

    @property
    def plain_s(self) -> float:
        """Seconds of a plain round, as measured or else expected; nan: unknown."""
        measured = self._plain.mean_s
        return self.expected_s if math.isnan(measured) else measured

    @property
    def _usual_s(self) -> float:
        """Seconds of a round in the mode in force; nan: unknown."""
        return self._plain.mean_s if self.in_force is Mode.PLAIN else self._drafts.mean_s

    def begin_text(self) -> None:
        """Another session begins, alone: if drafts have won more than they lost, it begins with
        them and is judged by what its own text gives."""
        if not self._winnings.spendable or self._probe is not None:
            return
        if self.in_force is Mode.SPECULATE:
            self._begin_anew()
        else:
            self.in_force = Mode.SPECULATE
            self._forget_drafts()

    def renew(self) -> None:
        """Drafts are made another way from now on: whatever those before them gave, they get a
        chance."""
        self.in_force = Mode.SPECULATE
        self._winnings.renew()
        self._forget_drafts()

    def observe(self, mode: Mode, seen: Seen) -> None:
        """Sessions decoded in `mode`."""
        if not (seen.rows > 0 and seen.seconds > 0.0):
            return
        probe = self._probe
        if probe is not None:
            if probe.mode is mode:
                self._probed(probe, seen)
            elif mode is Mode.PLAIN and seen.able < LEAST_ABLE:
                # Nobody is left to try it with.
                self._probe = None
        elif mode is self.in_force:
            self._went_on(mode, seen)

    def _went_on(self, mode: Mode, seen: Seen) -> None:
        """A round in the mode in force: see whether it is time to try the other one."""
        usual_s = self._usual_s
        if not math.isnan(usual_s):
            # Usual rounds count: a stall pays for no probe.
            served_s = seen.stands_for * seen.rounds * usual_s
            self._credit_s += (THIN_BUDGET if self._thin else BUDGET) * served_s
        if not seen.settled:
            # Coming back is part of what a probe costs.
            lost_s = max(0.0, self._lost_s(mode, seen))
            self._credit_s -= lost_s
            self._win(-lost_s, seen)
            return
        if mode is Mode.PLAIN:
            self._note_plain(seen)
            self._winnings.decoded_plainly(seen.stands_for * seen.rounds)
        else:
            if self._stalls.held_up(seen, self._drafts):
                seen = replace(seen, timed=False)
            self._note_drafts(seen)
            if self._worthless:
                self._leave()
                return
            self._fall_behind(seen)
        if self._probe is not None:
            return
        share = self._gathering.share
        # The least price that there is first: mostly not even that is there.
        affordable = self._credit_s >= LEAST_PRICE * usual_s * share
        affordable = affordable and self._credit_s >= self._price(mode.other, seen) * share
        if affordable and mode is Mode.PLAIN and seen.able < ABLE:
            if not self._gathering.wait(seen):
                self._credit_s = 0.0
            return
        self._gathering.end()
        if affordable:
            if mode is Mode.PLAIN:
                self._forget_drafts()
            self._probe = Probe(mode.other, PROBE_ROUNDS)
        elif mode is Mode.SPECULATE and self._unchecked:
            self._probe = Probe(Mode.PLAIN, CHECK_ROUNDS)

    @property
    def due(self) -> bool:
        """Whether speculation is to be tried as soon as enough sessions are able to."""
        return self._gathering.due

    @property
    def compared(self) -> bool:
        """Whether plain rounds were run here, so that its verdict is its own."""
        return self._plain.rounds > 0.0

    @property
    def _unchecked(self) -> bool:
        """Whether what plain rounds are expected to take decides, and none was ever run here."""
        if self._plain.rounds or self._drafts.rounds < UNCHECKED_ROUNDS:
            return False
        return self.gain < CLEAR_WIN or self._stood.rounds >= UNCHECKED_LONG

    def _note_plain(self, seen: Seen) -> None:
        if seen.timed:
            self._plain.observe(seen.round_s, seen.rounds)

    def _note_drafts(self, seen: Seen) -> None:
        self._stood.fade(seen.rounds / HALF_LIFE)
        self._stood.see(seen)
        if seen.timed:
            self._drafts.observe(seen.round_s, seen.rounds)
        if self._stood.rounds >= PROVEN_ROUNDS / 2.0 and not math.isnan(self.gain):
            self._decided = True
            self._proven = self._proven or (
                self._stood.rounds >= PROVEN_ROUNDS and self.gain > PROVEN_GAIN
            )

    def _fall_behind(self, seen: Seen) -> None:
        """Doubt speculation when it has lost too much since it was last ahead of plain decoding."""
        behind, plain_s = self._behind, self.plain_s
        behind.observe(seen)
        if math.isnan(plain_s):
            if behind.emitted.rounds >= BLIND_ROUNDS and behind.times.rounds > LEAST_ROUNDS:
                self._doubt()
            return
        # Without a time of its own a round is taken to have lasted as long as others.
        took_s = self._drafts.clipped(seen.round_s) if seen.timed else self._drafts.mean_s
        if math.isnan(took_s):
            return
        lost = seen.rounds * (took_s / plain_s - seen.tokens / seen.rows)
        self._win(-lost * plain_s, seen)
        if not behind.lose(lost):
            self._begin_anew()
        elif behind.doubtful(plain_s, proven=self._proven or self.gain > 1.0):
            self._doubt()

    def _win(self, seconds: float, seen: Seen) -> None:
        """Speculation has won so much time in a round, negative: lost; a stall says nothing of it,
        noticed as one or not."""
        if seen.timed and self.plain_s > 0.0:
            self._winnings.add(max(seconds / self.plain_s, -LOSS_LIMIT * seen.rounds))

    @property
    def _worthless(self) -> bool:
        """Whether hardly a draft token stands, chance aside."""
        if self._stood.rounds < WORTHLESS_ROUNDS:
            return False
        return self._stood.mean + SURE * math.sqrt(self._stood.variance) < WORTHLESS

    def _doubt(self) -> None:
        """Compare speculation with plain rounds of right now."""
        self._plain.forget()
        self._probe = Probe(Mode.PLAIN, DOUBT_ROUNDS, doubts=True)

    def _forget_drafts(self) -> None:
        self._drafts.forget()
        self._stood = Emitted()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._gathering.end()
        self._behind = Behind()

    def _lost_s(self, mode: Mode, seen: Seen) -> float:
        """Seconds of a session that this round took longer than the usual ones of `mode`."""
        if mode is Mode.PLAIN:
            lost = seen.round_s - self.plain_s
        else:
            lost = seen.round_s - seen.tokens / seen.rows / self._stood.mean * self._drafts.mean_s
        return 0.0 if math.isnan(lost) else lost * seen.rounds

    def _price(self, mode: Mode, seen: Seen) -> float:
        """Seconds that a probe of `mode` may be expected to lose; `seen`: the last round."""
        usual_s = self._usual_s
        if math.isnan(usual_s):
            return math.inf
        lost_s = self._prices.of(mode, usual_s=usual_s, sessions=seen.sessions)
        if mode is Mode.SPECULATE and not math.isnan(self.gain):
            # What the drafts were when they were left tells it before the first probe does.
            lost_s = max(lost_s, ENOUGH_ROUNDS * self._drafts.mean_s * (1.0 - self.gain))
            if self._worthless:
                lost_s = max(lost_s, WORTHLESS_PRICE * usual_s)
        return max(lost_s, LEAST_PRICE * usual_s) + self.ready_s * (mode is Mode.SPECULATE)

    def _probed(self, probe: Probe, seen: Seen) -> None:
        """A round in the mode that is being tried."""
        usual_s = self._usual_s
        probe.lose(seen, usual_s, 1.0 if self.in_force is Mode.PLAIN else self._stood.mean)
        if probe.counts(seen):
            if probe.mode is Mode.PLAIN:
                self._note_plain(seen)
            else:
                self._note_drafts(seen)
                self._behind.emitted.see(seen)
                took_s = self._drafts.clipped(seen.round_s)
                self._win(seen.rounds * (seen.tokens / seen.rows * usual_s - took_s), seen)
        broken = probe.too_dear(usual_s) or self._hopeless(probe)
        if broken or probe.over(usual_s) or (probe.won and self._succeeded(probe)):
            self._end(probe, broken)

    def _hopeless(self, probe: Probe) -> bool:
        """Whether the drafts that are being tried cannot be worth it any more."""
        if probe.mode is Mode.PLAIN or not self._drafts.rounds > LEAST_ROUNDS:
            return False
        if self._worthless:
            return True
        needed = self._drafts.mean_s / self.plain_s
        hopeless = self._behind.emitted.short_of(needed, sure=SURE_LOSS)
        self._thin = self._thin and not hopeless
        return hopeless

    def _succeeded(self, probe: Probe) -> bool:
        """Whether speculation, being tried, is seen to be faster."""
        enough = probe.mode is Mode.SPECULATE and self._drafts.rounds >= ENOUGH_ROUNDS
        return enough and self.gain > MARGIN

    def _end(self, probe: Probe, broken: bool) -> None:
        self._probe = None
        lost = max(0.0, probe.lost_s)
        self._prices.learn(probe.mode, lost)
        self._credit_s = min(0.0, self._credit_s - lost)
        if probe.mode is Mode.SPECULATE:
            if not broken and self._succeeded(probe):
                self.in_force = Mode.SPECULATE
            else:
                self._found = True
            self._begin_anew()
            return
        if not probe.doubts:
            return
        self._decided = True
        behind, plain_s = self._behind, self.plain_s
        emitted, needed = behind.emitted, behind.needed(plain_s)
        # Now it is known what plain rounds take.
        self._winnings.add(behind.deficit - emitted.rounds * (needed - emitted.mean))
        if not broken and behind.short_of(plain_s, sure=CONFIRMED):
            self.in_force, self._found = Mode.PLAIN, True
            self._winnings.gave_up(emitted, needed)
            self._thin = not behind.short_of(plain_s, sure=SURE_LOSS)
            # The times when it was ahead are over.
            self._stood, self._drafts = emitted, behind.times
        self._begin_anew()

    def _leave(self) -> None:
        """Decode plainly, without a comparison: there is nothing to compare."""
        self.in_force, self._decided, self._thin = Mode.PLAIN, True, False
        self._found = True
        self._credit_s = min(0.0, self._credit_s)
        self._winnings.gave_up(self._stood, math.inf)
        self._begin_anew()
