"""Look-ahead against lock-step for sessions of one kind: whichever emits more tokens per second is
in force (pure).

A model would have to know what a hit hides and what it costs: the drafter is late for a miss
because it drafts ahead, stale drafts stand less often, and on CPUs drafting ahead takes the
verifier's cores. So the judge is the one that weighs speculation against plain decoding
(`spec.contest`), with lock-step in the place of plain decoding. What a row of lock-step emits is
not one token but has to be learnt: see `LookAhead.worth`.
"""

from __future__ import annotations

from typing import Final

from outrider.spec.contest import Contest, Mode, Seen
from outrider.spec.evidence import Emitted

HALF_LIFE: Final = 256.0
"""Rounds of a way after which what its rows emitted counts half."""
LONG_HALF_LIFE: Final = 2048.0
"""Rounds of the other way after which it does."""
STALE: Final = 0.95
STALE_DEVIATION: Final = 0.08
"""What a row emits under look-ahead over lock-step, as heads were seen to do it: some drafts are
made from features of a round ago."""
CLEAR: Final = 1.2
"""How much faster one way must be for the other to be left out where speculation is in doubt."""
COUNTED_ROWS: Final = 4096.0
"""Rows after which hits are counted anew."""


class LookAhead:
    """Which way is in force at each load, for one kind of session."""

    def __init__(self, *, first: bool) -> None:
        """`first`: whether sessions begin with look-ahead."""
        self._first = Mode.SPECULATE if first else Mode.PLAIN
        self._contests: dict[int, Contest] = {}
        self._fresh = Emitted()
        """Of rows in lock-step."""
        self._stale = Emitted()
        """Of rows under look-ahead that had a draft."""
        self._hits = 0.0
        self._rows = 0.0

    def ahead(self, load: int) -> bool:
        """Whether sessions are to be drafted for ahead of their verdicts now."""
        return self._contest(load).mode is Mode.SPECULATE

    def trying(self, load: int) -> bool:
        """Whether that is only to see what the other way gives."""
        return self._contest(load).trying

    def gain(self, load: int) -> float:
        """Tokens per second under look-ahead over lock-step; nan while one is unknown."""
        return self._contest(load).gain

    def forget(self) -> None:
        """Another drafter takes over: what was found tells nothing of it."""
        self._contests.clear()
        self._fresh, self._stale = Emitted(), Emitted()
        self._hits = self._rows = 0.0

    @property
    def misses(self) -> float:
        """Share of the rounds under look-ahead whose draft was not there when they were due, in
        [0, 1]; 1 while nothing is known."""
        return 1.0 - self._hits / self._rows if self._rows else 1.0

    @property
    def worth(self) -> float:
        """Tokens that a row of lock-step emits.

        Few of them are run while look-ahead is in force, and their tokens vary by half. So those
        under look-ahead count too, as far as what stale drafts lose can be supposed: at first they
        tell more, with more rounds of lock-step less.
        """
        fresh, stale = self._fresh, self._stale
        if not stale.rows:
            return fresh.mean if fresh.rows else 1.0
        supposed = max(1.0, stale.mean / STALE)
        doubt = stale.variance + (STALE_DEVIATION * supposed) ** 2
        if not fresh.rows:
            return supposed
        weight = fresh.variance / (fresh.variance + doubt)
        return weight * supposed + (1.0 - weight) * fresh.mean

    def observe(
        self, load: int, seen: Seen, *, ahead: bool, hits: int = 0, missed: int = 0
    ) -> bool:
        """Rows of a round that was run so; `hits` of them had a draft that was made ahead,
        `missed` went without any. Returns whether another way is in force from now on, probes
        aside."""
        contest = self._contest(load)
        if ahead and seen.settled:
            self._count(seen.rows, hits)
        self._note(seen, ahead=ahead, missed=missed)
        before = contest.in_force
        contest.worth = self.worth
        contest.observe(Mode.SPECULATE if ahead else Mode.PLAIN, seen)
        return contest.in_force is not before

    def follow(self, speculation: Contest, before: Mode, load: int) -> None:
        """The contest of speculation with plain decoding has changed its mode; `before`: what was
        in force there.

        Where speculation was left and look-ahead is not known to be much better than lock-step,
        that gets its turn against plain decoding. And while nobody speculates, it is tried now and
        then one way and now the other, unless that is known to be much worse.
        """
        contest = self._contest(load)
        ahead = contest.in_force is Mode.SPECULATE
        if contest.trying or (contest.gain if ahead else 1.0 / contest.gain) > CLEAR:
            return
        left = before is Mode.SPECULATE and speculation.in_force is Mode.PLAIN
        if left and ahead:
            contest.in_force = Mode.PLAIN
            speculation.renew()
        elif speculation.trying and speculation.mode is Mode.SPECULATE:
            contest.in_force = Mode.PLAIN if ahead else Mode.SPECULATE

    def _count(self, rows: int, hits: int) -> None:
        if self._rows > COUNTED_ROWS:
            self._rows, self._hits = self._rows / 2.0, self._hits / 2.0
        self._rows += rows
        self._hits += hits

    def _note(self, seen: Seen, *, ahead: bool, missed: int) -> None:
        """Count what rows with drafts emitted; others emit a token each."""
        mine, other = (self._stale, self._fresh) if ahead else (self._fresh, self._stale)
        mine.fade(seen.rounds / HALF_LIFE)
        other.fade(seen.rounds / LONG_HALF_LIFE)
        missed = missed if ahead else 0
        if seen.settled and seen.rows > missed:
            mine.observe(
                seen.rows - missed, seen.tokens - missed, seen.squares - missed, seen.rounds
            )

    def _contest(self, load: int) -> Contest:
        """That of a load; where nothing is known it begins with what was found at the nearest."""
        contest = self._contests.get(load)
        if contest is None:
            decided = [known for known, found in self._contests.items() if found.decided]
            if decided:
                near = min(decided, key=lambda known: abs(known - load))
                contest = Contest.beside(self._contests[near], near - load)
            else:
                contest = Contest.begun(self._first)
            self._contests[load] = contest
        return contest
