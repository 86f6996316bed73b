"""Per-session state of the GPU proposer in host columns: slot, KV rows, shape. No tensors."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.engine.logits_processor import has_penalties
from outrider.spec.noise import NoiseStream
from outrider.spec.plan import SpeculationPlan
from outrider.spec.sampling import Rule
from outrider_drafter.gpu.shapes import DraftTreeShape
from outrider_drafter.state.session import FollowedSession

NO_SLOT: Final = -1


HAS_PENALTIES: Final = 1
"""Flag of a session: its tokens are counted for its penalties."""
HAS_LOGITS_PROCESSING: Final = 2
"""Flag of a session: its sampling parameters change its logits."""
HAS_GRAMMAR: Final = 4
"""Flag of a session: a grammar restricts its tokens."""
NEEDS_GENERAL_GRAPH: Final = 8
"""Flag of a session: only the graphs with logits processing draft for it. It processes logits, is
in a grammar, grows trees of the best children by the target's noise, or sends its distributions."""
USES_PREFIX_NOISE: Final = 16
"""Flag of a session: each of its prefixes draws from noise of its own."""


class DraftSlotTable:
    """Device state of each session; columns by slot of the session table."""

    def __init__(self) -> None:
        self.seats = np.empty(0, dtype=np.int64)
        """[X]: slot of `PagedDraftKV`; -1 without one."""
        self.stable = np.empty(0, dtype=np.int64)
        """[X]: KV rows made from real features."""
        self.room = np.empty(0, dtype=np.int64)
        """[X]: rows that there are blocks for."""
        self.counted = np.empty(0, dtype=np.int64)
        """[X]: tokens that the device's penalties know of."""
        self.wanted = np.empty(0, dtype=np.int64)
        """[X]: nodes that the plan asks for; this and what follows are as of the last change of its
        plan."""
        self.traits = np.empty(0, dtype=np.int64)
        """[X]: a sum of PENALISED, WARPS, .."""
        self.keys = np.empty(0, dtype=np.uint64)
        """[X]: key of the DRAFT noise; 0 under other rules than rejection."""
        self.shapes: list[tuple[SpeculationPlan, DraftTreeShape] | None] = []
        """[X]: what is grown while the plan is this one and there is room for it."""

    def ensure_size(self, slots: int) -> None:
        """Have columns for this many slots."""
        more = slots - len(self.seats)
        if more > 0:
            self.seats = np.concatenate((self.seats, np.full(more, NO_SLOT)))
            self.stable = _longer(self.stable, more)
            self.room = _longer(self.room, more)
            self.counted = _longer(self.counted, more)
            self.wanted = _longer(self.wanted, more)
            self.traits = _longer(self.traits, more)
            self.keys = np.concatenate((self.keys, np.zeros(more, dtype=np.uint64)))
            self.shapes += [None] * more

    def describe_session(self, session: FollowedSession, *, warps: bool) -> None:
        """Note what follows from a session's plan and sampling parameters; `warps`: whether it does
        anything to its logits. Of its plan each time that it is another one."""
        plan, sampling, slot = session.plan, session.sampling, session.slot
        rule = sampling.effective_rule
        by_noise = plan.top_k > 1 and rule is Rule.COUPLED
        general = warps or session.has_constraint or session.ships_distributions or by_noise
        self.traits[slot] = (
            HAS_PENALTIES * has_penalties(sampling)
            + HAS_LOGITS_PROCESSING * warps
            + HAS_GRAMMAR * session.has_constraint
            + NEEDS_GENERAL_GRAPH * general
            + USES_PREFIX_NOISE * session.uses_prefix_noise
        )
        self.wanted[slot] = plan.draft_tokens
        drawn = session.ships_distributions and sampling.has_noise_stream(NoiseStream.DRAFT)
        self.keys[slot] = sampling.stream_key(NoiseStream.DRAFT) if drawn else 0


def _longer(column: NDArray[np.int64], more: int) -> NDArray[np.int64]:
    return np.concatenate((column, np.zeros(more, dtype=np.int64)))
