"""Per-session state of the GPU proposer in host arrays: device slot, KV rows, draft shape.

Letters in shapes: X session slots.
"""

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
"""Flag of a session with sampling penalties, for which the device counts the tokens."""
HAS_LOGITS_PROCESSING: Final = 2
"""Flag of a session whose sampling parameters change its logits."""
HAS_GRAMMAR: Final = 4
"""Flag of a session with a grammar or token limits."""
NEEDS_GENERAL_GRAPH: Final = 8
"""Flag of a session that needs the graphs with logits processing: it processes its logits, has a
grammar or token limits, draws trees with the target's random numbers, or sends its draft
distributions."""
USES_PREFIX_NOISE: Final = 16
"""Flag of a session that draws drafts for different prefixes with different random-number keys."""


class DraftSlotTable:
    """Host copy of what each session has on the device, and of its draft settings. Every array has
    one element for each slot of the session table."""

    def __init__(self) -> None:
        self.seats = np.empty(0, dtype=np.int64)
        """[X]: device slot in `PagedDraftKV`; -1 if the session has none."""
        self.stable = np.empty(0, dtype=np.int64)
        """[X]: number of KV rows that were computed from accepted tokens and, for a head, from the
        target's features. These rows stay valid."""
        self.room = np.empty(0, dtype=np.int64)
        """[X]: number of KV rows for which blocks are reserved."""
        self.counted = np.empty(0, dtype=np.int64)
        """[X]: number of tokens that are included in the penalty counts on the device."""
        self.wanted = np.empty(0, dtype=np.int64)
        """[X]: number of draft tokens that the session's plan asks for."""
        self.traits = np.empty(0, dtype=np.int64)
        """[X]: flags of the session, such as HAS_PENALTIES, combined by bitwise or."""
        self.keys = np.empty(0, dtype=np.uint64)
        """[X]: key of the random numbers (DRAFT noise) for the session's drafts; 0 unless the
        acceptance rule is rejection."""
        self.shapes: list[tuple[SpeculationPlan, DraftTreeShape] | None] = []
        """[X]: a plan and the draft shape that was computed from it. The shape is valid while the
        session has this plan and enough draft levels left for the shape. None if no shape is
        known."""

    def ensure_size(self, slots: int) -> None:
        """Extend all arrays to at least `slots` elements."""
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
        """Fill the session's elements that depend on its plan and its sampling parameters. Call
        this whenever the plan changes. `warps`: whether the session has penalties, biases, bans,
        top-k, top-p or min-p, so that its draft logits are processed."""
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
