"""Controller of in-process drafts: sessions use them unless plain decoding is faster. Pure.

An in-process drafter follows a session from its prompt on: once a session has decoded plainly its
drafts are lost for good, so drafting cannot be probed. Known without a probe are the tokens that a
row emits, the time of a round, and the device time measured for the same round with and without
drafts. The rest of a round's time is hidden where plain rounds run ahead, or grows with the
verified nodes (noise for each node, T > 0), so plain rounds that were observed decide. Where there
were none, and drafts would lose if a plain round had only the root's share of that rest, some are
run: for a moment, but sessions that are alive then decode plainly to their end. Tokens per row do
not depend on the number of rows, so all loads share them; a decision holds for one load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from outrider.spec.decoding_mode import DecodingMode
from outrider.speculation.measurements import EmissionStats, RoundTimeWindow

MIN_ROUNDS: Final = 6.0
MIN_ROWS: Final = 12.0
"""Rounds, and rows of these, before drafts may be given up."""
HALF_LIFE_ROUNDS: Final = 256.0
"""Rounds after which an emission counts half."""
TIME_NOISE: Final = 0.05
"""Deviation of one round's time: the device's are known."""
MIN_STD_ERRORS: Final = 2.5
"""Standard errors by which they must be worth too little."""
TIME_STD_ERRORS: Final = 1.5
"""The same of what rounds were seen to take: what is in doubt for long costs more than an error."""
MIN_GAIN: Final = 1.03
"""What they must gain over plain rounds that were seen: prompts wait longer beside drafts."""
CLEAR_GAIN: Final = 2.0
"""What drafts seem to gain, if the host's share is the same, beyond which it decides nothing."""
HOST_WINDOW_ROUNDS: Final = 48
"""Rounds that tell the host's share at a load: of fewer, a burst of sessions that begin would be
most."""
MIN_HOST_ROUNDS: Final = 4.0
"""How many of them it takes."""
MAX_TRIALS: Final = 3
"""Of which nothing was seen, because the load changed meanwhile."""
TRIAL_DURATION_S: Final = 0.25
TRIAL_ROUNDS: Final = 8.0
"""How long sessions decode plainly to see what such rounds take, and how many at least."""
MIN_SWITCH_GAIN: Final = 1.2
MAX_LOSING_S: Final = 1.0
"""How long drafts that have gained so much over plain rounds that were seen must lose at the same
load before they are given up: a host that is held up holds up all rounds of a moment, so that each
seems to confirm the other."""
MIN_HOLD_S: Final = 30.0
MAX_HOLD_S: Final = 1800.0
"""How long sessions begin without drafts; doubles each time that drafts are given up again."""


@dataclass(slots=True)
class InProcessDraftController:
    """Chooses the mode in which sessions of a verifier with an in-process drafter begin."""

    _stood: EmissionStats = field(default_factory=EmissionStats)
    _host: dict[int, RoundTimeWindow] = field(default_factory=dict)
    """What rounds took beyond the device's time, by load."""
    _new: EmissionStats = field(default_factory=EmissionStats)
    """Since the last verdict."""
    _gain: float = math.nan
    _until: dict[int, float] = field(default_factory=dict)
    _hold_s: dict[int, float] = field(default_factory=dict)
    """By load."""
    _trials: dict[int, int] = field(default_factory=dict)
    """How often plain rounds were run at a load to be seen."""
    _won: dict[int, float] = field(default_factory=dict)
    """When drafts that win at a load, or have won there, last did not lose."""

    @property
    def gain(self) -> float:
        """Speed relative to plain decoding at the last round; nan while it is not known."""
        return self._gain

    def choose_mode(self, load: int, now: float) -> DecodingMode:
        """How sessions are to decode; a verdict for plain decoding holds for a while."""
        return (
            DecodingMode.PLAIN if now < self._until.get(load, -math.inf) else DecodingMode.SPECULATE
        )

    def is_active_above(self, load: int, now: float) -> bool:
        """Whether drafts were made at a higher load, and are in force there."""
        held = [other for other in self._host if other > load]
        return any(self.choose_mode(other, now) is DecodingMode.SPECULATE for other in held)

    def observe_round(
        self,
        rows: int,
        tokens: float,
        squares: float,
        *,
        load: int,
        host_s: float | None = None,
        weight: float = 1.0,
    ) -> None:
        """In a round `rows` sessions verified in-process drafts and emitted `tokens`, the sum of
        their squares being `squares`; it took `host_s` longer than the device was measured to, and
        counts `weight` for that: None if it tells nothing of times, as where rows without drafts
        took part."""
        if rows < 1:
            return
        self._stood.decay(1.0 / HALF_LIFE_ROUNDS)
        self._stood.add_rows(rows, tokens, squares, 1.0)
        self._new.add_rows(rows, tokens, squares, 1.0)
        if host_s is not None:
            seen = self._host.setdefault(load, RoundTimeWindow(HOST_WINDOW_ROUNDS))
            seen.observe_round(max(0.0, host_s), weight)

    def evaluate(
        self,
        load: int,
        plain_s: float,
        own_s: float,
        now: float,
        *,
        nodes: int,
        seen_s: float | None = None,
        seen_error: float = 0.0,
        lasting: bool = True,
    ) -> None:
        """Give drafts up at this load if the device's times for a round of its sessions, without
        drafts and with them, leave them no chance; `seen_s`: what such plain rounds were seen to
        take, the host's share included, give or take a share `seen_error` of it, and `nodes` of a
        draft what else is known of that. `lasting`: whether the load has been what it is for long
        enough to try anything."""
        host = self._host.get(load)
        # Rounds of both kinds are in flight: until others are seen the device alone tells.
        host_s = 0.0 if host is None else host.mean_s
        known = host is not None and host.rounds >= MIN_HOST_ROUNDS
        if not (known and lasting):
            # Of sessions that begin together all have to be opened, and drafts pay for that.
            seen_s = None
        round_s = own_s + host_s
        needed = round_s / (seen_s or plain_s + host_s)
        self._gain = self._stood.mean / needed
        if self._new.rounds < MIN_ROUNDS or self._new.rows < MIN_ROWS:
            return
        if now < self._until.get(load, -math.inf):
            return
        lose = self._short_of(needed if seen_s is None else MIN_GAIN * needed)
        if lose and seen_s is not None:
            # Rounds with prompts take now this, now that: a few of them prove nothing.
            host_error = host_s * host.error / round_s if host is not None and host_s else 0.0
            doubt = TIME_STD_ERRORS / MIN_STD_ERRORS * math.hypot(host_error, seen_error)
            lose = self._short_of(MIN_GAIN * needed, doubt)
        if lose:
            if now - self._won.get(load, -math.inf) >= MAX_LOSING_S:
                self._give_up(load, now)
            return
        if load in self._won or (seen_s is not None and self._gain >= MIN_SWITCH_GAIN):
            self._won[load] = now
        if self._gain >= 1.0:
            self._hold_s.pop(load, None)
        unsure = known and lasting and seen_s is None and self._gain < CLEAR_GAIN
        if unsure and self._short_of(round_s / (plain_s + host_s / (1 + nodes))):
            self._try_plain(load, now, round_s)

    def _try_plain(self, load: int, now: float, round_s: float) -> None:
        trials = self._trials.get(load, 0)
        if trials < MAX_TRIALS:
            self._trials[load] = trials + 1
            self._until[load] = now + max(TRIAL_DURATION_S, TRIAL_ROUNDS * round_s)

    def _give_up(self, load: int, now: float) -> None:
        self._won.pop(load, None)
        hold_s = self._hold_s.get(load, MIN_HOLD_S)
        self._until[load] = now + hold_s
        self._hold_s[load] = min(2.0 * hold_s, MAX_HOLD_S)
        self._new = EmissionStats()

    def _short_of(self, needed: float, unsure: float = 0.0) -> bool:
        return self._stood.is_below(
            needed, sure=MIN_STD_ERRORS, time_noise=TIME_NOISE, unsure=unsure
        )
