"""What a device holds of each session that it drafts for (no tensors)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.logits_processor import has_penalties
from outrider.spec.noise import Stream
from outrider.spec.plan import Plan
from outrider.spec.sampling import Rule
from outrider_drafter.gpu.shapes import Shape
from outrider_drafter.state.session import Session

UNSEATED: Final = -1


PENALISED: Final = 1
"""What of a session decides in which form it is drafted for: its tokens are counted for its
penalties;"""
WARPS: Final = 2
"""it does something to its logits;"""
CONSTRAINED: Final = 4
"""it is in a grammar;"""
GENERAL: Final = 8
"""its drafts have only the form that may warp logits, whatever it does to them: it warps them, is
in a grammar, grows trees of the best children by the target's noise, or ships its laws;"""
AHEAD: Final = 16
"""each of its prefixes draws from noise of its own."""


class Seats:
    """What the device holds of each session; columns by slot of the session table."""

    def __init__(self) -> None:
        self.seats = np.empty(0, dtype=np.int64)
        """[X]: slot of `DeviceRows`; -1 without one."""
        self.stable = np.empty(0, dtype=np.int64)
        """[X]: K/V rows made from real features."""
        self.room = np.empty(0, dtype=np.int64)
        """[X]: rows that there are blocks for."""
        self.counted = np.empty(0, dtype=np.int64)
        """[X]: tokens that the device's penalties know of."""
        self.wanted = np.empty(0, dtype=np.int64)
        """[X]: nodes that the plan asks for; this and what follows as `describe` found it."""
        self.traits = np.empty(0, dtype=np.int64)
        """[X]: a sum of PENALISED, WARPS, .."""
        self.keys = np.empty(0, dtype=np.uint64)
        """[X]: key of the DRAFT noise; 0 under other rules than rejection."""
        self.shapes: list[tuple[Plan, Shape] | None] = []
        """[X]: what is grown while the plan is this one and there is room for it."""

    def cover(self, slots: int) -> None:
        """Have columns for this many slots."""
        more = slots - len(self.seats)
        if more > 0:
            self.seats = np.concatenate((self.seats, np.full(more, UNSEATED)))
            self.stable = _longer(self.stable, more)
            self.room = _longer(self.room, more)
            self.counted = _longer(self.counted, more)
            self.wanted = _longer(self.wanted, more)
            self.traits = _longer(self.traits, more)
            self.keys = np.concatenate((self.keys, np.zeros(more, dtype=np.uint64)))
            self.shapes += [None] * more

    def describe(self, session: Session, *, warps: bool) -> None:
        """Note what follows from a session's plan and sampling parameters; `warps`: whether it does
        anything to its logits. Of its plan each time that it is another one."""
        plan, sampling, slot = session.plan, session.sampling, session.slot
        rule = sampling.effective_rule
        rejection = rule is Rule.REJECTION
        by_noise = plan.top_k > 1 and rule is Rule.COUPLED
        general = warps or session.constrained or rejection or by_noise
        self.traits[slot] = (
            PENALISED * has_penalties(sampling)
            + WARPS * warps
            + CONSTRAINED * session.constrained
            + GENERAL * general
            + AHEAD * (plan.look_ahead > 0 and rejection)
        )
        self.wanted[slot] = plan.draft_tokens
        drawn = rejection and sampling.knows(Stream.DRAFT)
        self.keys[slot] = sampling.stream_key(Stream.DRAFT) if drawn else 0


def _longer(column: NDArray[np.int64], more: int) -> NDArray[np.int64]:
    return np.concatenate((column, np.zeros(more, dtype=np.int64)))
