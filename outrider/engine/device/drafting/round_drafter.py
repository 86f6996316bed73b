"""RoundDrafter protocol: a drafter whose drafts a round's graphs read on the verifier's device.

Shapes: X session slots, n drafts per session, B sessions of a launch.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.engine.device.drafting.draft_forward import NewRows
from outrider.engine.device.slots.logits_slots import LogitsSlots
from outrider.engine.kernels.acceptance.randomized import (
    DenseChainDistribution,
    SparseDistribution,
)


class RoundDrafter(Protocol):
    """Drafter that keeps its drafts on the verifier's device, by session slot.

    Its functions are recorded in CUDA graphs, so they launch kernels and read no values on the
    host.
    """

    @property
    def tokens(self) -> Tensor:
        """int32 [X, n]: the drafts that each session's next round verifies; -1 for absent nodes."""
        ...

    def parents_of(self, num_nodes: int) -> Tensor | None:
        """Return the parents of the drafts, int32 [X, >= num_nodes - 1], for rounds with
        `num_nodes` nodes per row, including the root. None if the drafts are chains."""
        ...

    @property
    def logits_slots(self) -> LogitsSlots | None:
        """State of the sessions' logits processor over the draft vocabulary; None if it is not kept
        on this device."""
        ...

    def receive_drafts(
        self, slots: Tensor, *, num_nodes: int, rejection: bool
    ) -> SparseDistribution | DenseChainDistribution | None:
        """Write the drafts of the sessions in `slots`, int32 [B], to `tokens`, and return the
        distributions that they were drawn from.

        Returns None if there are no distributions; the rejection rule then judges the drafts as
        target-only. num_nodes: nodes per row, including the root. rejection: whether the round may
        have sessions of the rejection rule (see `AcceptanceMode.REJECTION`).
        """
        ...

    def flag_undrafted(self, flags: Tensor) -> Tensor:
        """Return the flags int32 [B] of the rows of the last `receive_drafts`. UNDRAFTED is added
        for rows that had no draft on the device, if the host cannot know this."""
        ...

    def begin_rows(self) -> None:
        """Begin the rows of a launch. `write_rows` follows for prompts, if there are any, and then
        `draft_round`."""

    def write_rows(self, rows: NewRows) -> None:
        """Process rows whose predictions are not needed."""

    def draft_round(self, rows: NewRows, *, num_nodes: int, sampled: bool) -> None:
        """Process rows and draft after the last row of each session. num_nodes: nodes per row of
        the next round, including the root. sampled: whether any session may process its logits or
        need the distributions of its drafts."""
