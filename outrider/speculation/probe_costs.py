"""Expected loss of probing the mode that is not in force. Pure.

It is the loss of the last probe; before there was one, that of a probe at a higher load, or an
estimate by the number of sessions that return to drafts: their drafter has to read all that they
emitted meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.spec.decoding_mode import Mode

FIRST_PROBE_COST: Final = 2.0
"""Rounds of the mode in force that a probe counts as which was never made,"""
RETURN_COST: Final = 0.15
"""and with drafts, for each session that comes back to them (64 at an 8B's cost: .1 to .25 s, 20 to
50 rounds)."""


@dataclass(slots=True)
class ProbeCosts:
    """Losses of probes at one load, in seconds."""

    _lost_s: dict[Mode, float] = field(default_factory=dict)
    """What the last probe of a mode lost."""
    _likely_s: float = 0.0
    """What one of speculation lost at a higher load, by the sessions that there are here."""

    @classmethod
    def from_other_load(cls, other: ProbeCosts, halvings: int) -> ProbeCosts:
        """Those at a load at which nothing was tried, by those at one that is `halvings` higher.
        Of a lower one nothing follows: most of what its probe lost does not grow with sessions."""
        if halvings <= 0:
            return cls()
        lost_s = other._lost_s.get(Mode.SPECULATE, other._likely_s)
        return cls(_likely_s=lost_s * 0.5**halvings)

    def record_loss(self, mode: Mode, lost_s: float) -> None:
        """A probe of `mode` lost so much."""
        self._lost_s[mode] = lost_s

    def expected_loss_s(self, mode: Mode, *, usual_s: float, sessions: int) -> float:
        """What one of `mode` may lose, where a round in the other takes `usual_s`."""
        known_s = self._lost_s.get(mode)
        if known_s is not None:
            return known_s
        if mode is Mode.PLAIN:
            return FIRST_PROBE_COST * usual_s
        return max(self._likely_s, (FIRST_PROBE_COST + RETURN_COST * sessions) * usual_s)
