"""How loaded a verifier is, and what that makes of its rounds: plain ones, prompts' share (pure).

A load is a power of two of sessions, by its exponent. Times are seconds.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from outrider.spec.costs import CostTable
from outrider.spec.evidence import RoundTimes

STEADY: Final = 0.6
"""Doublings by which the sessions may differ from a load before there is another: a session that
ends and the one that follows it change nothing."""
MOST_ADDED: Final = 0.9
"""Share of a round's time that prompts may have added by the device's times."""
FULL: Final = 0.75
"""Share of the sessions without which a round tells nothing of the load."""
LASTING: Final = 16
"""Rounds that fewer sessions must last for the load to be a lower one: of a wave that ends, many
are about to be followed by others."""
AT_ONCE: Final = 1.5
"""Doublings of difference that need not last."""
PLAIN_WINDOW: Final = 48
"""Plain rounds that tell what one takes: a few that were held up, in a row, tell nothing."""
LEAST_SEEN: Final = 4.0
"""How many of them are needed where anything else tells it."""
BESIDE_PROMPTS: Final = 0.25
"""What one with prompts counts: what these added is known no better than that."""


class Times(Protocol):
    """What the device was measured to take for a round in which so many sessions decode, with or
    without own drafts, beside so many pieces of prompts; None: not known."""

    def __call__(self, rows: int, *, own: bool, pieces: int = 0) -> float | None: ...


class Loads:
    """The load of now, and what was seen of plain rounds at each."""

    def __init__(self, times: Times, costs: CostTable) -> None:
        self.times = times
        self._costs = costs
        self._plain: dict[int, RoundTimes] = {}
        self._rounds = 0
        """That were observed."""
        self._fewer_since: int | None = None
        """The round since which there have been too few sessions for the load; None: there are
        not."""
        self.load = 0
        self.sessions = 1
        """Sessions being served, at least 1."""
        self.prompts_s = 0.0
        """What prompts have added to rounds, ever."""
        self.alone_s = 0.0
        """What rounds of nothing but prompts have taken, ever."""

    def begin_round(self, sessions: int) -> bool:
        """So many sessions are being served; whether the load is another one now."""
        self.sessions = max(1, sessions)
        above = math.log2(self.sessions) - self.load
        if above >= -STEADY:
            self._fewer_since = None
        if abs(above) <= STEADY or not (above > 0.0 or self._lasts(above)):
            return False
        before, self.load, self._fewer_since = self.load, round(self.load + above), None
        return self.load != before

    def _lasts(self, above: float) -> bool:
        """Whether there have been fewer sessions for long enough; `above`: negative doublings."""
        if self._fewer_since is None:
            self._fewer_since = self._rounds
        return above <= -AT_ONCE or self._rounds - self._fewer_since >= LASTING

    @property
    def plain_s(self) -> float:
        """A plain round of the present sessions: as seen at this load, or else by the device's
        times and what the host added to them at the nearest load; nan: nothing tells."""
        seen = self._plain.get(self.load)
        if seen is not None and seen.rounds >= LEAST_SEEN:
            return seen.mean_s
        device_s = self.times(self.sessions, own=False)
        if not device_s:
            return math.nan if seen is None else seen.mean_s
        known = [load for load, found in self._plain.items() if found.rounds >= LEAST_SEEN]
        if not known:
            return device_s
        near = min(known, key=lambda load: abs(load - self.load))
        there_s = self.times(1 << near, own=False)
        return device_s * max(1.0, self._plain[near].mean_s / there_s) if there_s else device_s

    @property
    def round_s(self) -> float:
        """The same where something must be known: by forwards of other shapes; 0: unknown."""
        plain_s = self.plain_s
        if math.isnan(plain_s):
            plain_s = self._costs.estimate(self.sessions, 0)
        return 0.0 if math.isnan(plain_s) else plain_s

    def observe(
        self, rows: int, nodes: int, pieces: int, piece_tokens: int, seconds: float, *, own: bool
    ) -> float:
        """A round took `seconds`; `rows` decoded, `nodes` draft nodes were verified. Returns its
        seconds without what `pieces` of prompts added, by the device's times or else by their share
        of its tokens."""
        added_s = self._added_s(rows, nodes, pieces, piece_tokens, seconds, own=own)
        self.prompts_s += added_s
        self._rounds += 1
        if not rows:
            self.alone_s += seconds
        elif not nodes and not own and rows >= FULL * self.sessions:
            seen = self._plain.setdefault(self.load, RoundTimes(PLAIN_WINDOW))
            seen.observe(seconds - added_s, BESIDE_PROMPTS if pieces else 1.0)
        return seconds - added_s

    def _added_s(
        self, rows: int, nodes: int, pieces: int, piece_tokens: int, seconds: float, *, own: bool
    ) -> float:
        if not pieces:
            return 0.0
        # Alone they are charged as they would be beside the sessions: a round of their own, which
        # others may have to wait for, is what speculation costs.
        beside = rows or self.sessions
        with_s = self.times(beside, own=own, pieces=pieces)
        without_s = self.times(beside, own=own)
        if with_s and without_s:
            return min(max(0.0, with_s - without_s), MOST_ADDED * seconds)
        prompts = pieces * piece_tokens
        return seconds * prompts / (prompts + beside + nodes)
