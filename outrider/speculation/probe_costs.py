"""Expected loss of probing the mode that is not in force.

The expected loss of a mode is the loss of its last probe. Before the first probe of plain decoding
it is a fixed number of rounds, whatever the load and the number of sessions. Before the first probe
of speculation it is the larger of two values: the loss of such a probe at a higher load, scaled
down to this load, and an estimate that grows with the number of sessions, because their drafter has
to read all tokens that they emitted without it. No I/O and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from outrider.spec.decoding_mode import DecodingMode

FIRST_PROBE_ROUNDS: Final = 2.0
"""Expected loss of the first probe of a mode, in rounds of the mode in force."""
DRAFTER_CATCH_UP_ROUNDS: Final = 0.15
"""Rounds that the first probe of speculation is expected to lose in addition for each session,
while the drafter catches up. With an 8B model 64 sessions took .1 to .25 s, which is 20 to 50
rounds."""


@dataclass(slots=True)
class ProbeCosts:
    """Losses of the probes at one load, in seconds."""

    _lost_s: dict[DecodingMode, float] = field(default_factory=dict)
    """Loss of the last probe, by mode."""
    _likely_s: float = 0.0
    """Loss of a probe of speculation at a higher load, scaled down to this load; 0: there was
    none."""

    @classmethod
    def from_other_load(cls, other: ProbeCosts, halvings: int) -> ProbeCosts:
        """Return the costs of a load without probes, from those of a load that is `halvings`
        halvings higher. Nothing is derived from a lower load: most of the loss of its probe does
        not grow with the number of sessions."""
        if halvings <= 0:
            return cls()
        lost_s = other._lost_s.get(DecodingMode.SPECULATE, other._likely_s)
        return cls(_likely_s=lost_s * 0.5**halvings)

    def record_loss(self, mode: DecodingMode, lost_s: float) -> None:
        """Record the loss of a probe of `mode`."""
        self._lost_s[mode] = lost_s

    def expected_loss_s(self, mode: DecodingMode, *, usual_s: float, sessions: int) -> float:
        """Return what a probe of `mode` may lose; a round of the other mode takes `usual_s`."""
        known_s = self._lost_s.get(mode)
        if known_s is not None:
            return known_s
        if mode is DecodingMode.PLAIN:
            return FIRST_PROBE_ROUNDS * usual_s
        return max(
            self._likely_s, (FIRST_PROBE_ROUNDS + DRAFTER_CATCH_UP_ROUNDS * sessions) * usual_s
        )
